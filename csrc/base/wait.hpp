// Waits for another thread or process: spins briefly, then parks on a futex. Every wait has a deadline and can be
// interrupted.
//
// Protocol of a Doorbell (it may lie in shared memory):
//   waiter   1. sleepers += 1           (seq_cst, once per wait)
//            2. seen = rings            (acquire)
//            3. ready() or a failure?   -> leave
//            4. FUTEX_WAIT(rings, seen) -> returns at once if rings != seen; then again from 2
//   notifier 1. publish the data        (release store that ready() reads with acquire)
//            2. sleepers += 0           (seq_cst: a read-modify-write, not a load)
//            3. not 0?                  -> rings += 1, FUTEX_WAKE
// All changes of `sleepers` have one order. If the waiter's comes first, the notifier sees it and rings; if the
// notifier's comes first, the waiter's reads from it, so its ready() sees the data. A ring after the waiter's step 2
// changes the futex word, so no wake-up is lost. A failure (a peer died, an abort arrived) is announced by ring(), which
// does not look at sleepers: the waiter sees the failure in step 3, or the futex word has changed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace pypipe {

struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleepers{0};
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// How long to wait, and whether to poll before parking. `interruption` is called now and then during a wait and may
// throw (Ctrl-C). `prolong` is called when the timeout has passed; if it returns true, the wait starts another timeout.
struct WaitPolicy {
  std::chrono::nanoseconds timeout{std::chrono::minutes(10)};
  std::uint32_t spins = 0;                   // polls before parking; few where ranks outnumber cores
  std::chrono::nanoseconds longest_spin{0};  // how long to poll when the wait is expected to end
  std::function<void()> interruption;
  std::function<bool()> prolong;
};

// How long the waits of one waiter took at one place of a step. Waking a thread costs the sleeper a hundred
// microseconds where the core has gone idle, and the notifier some tens, so a waiter polls when its wait is about to
// end. Polling all through a wait of many milliseconds would keep the core from other threads. Used by one thread.
class WaitHistory {
 public:
  using Duration = std::chrono::nanoseconds;

  // How long to sleep before polling for `longest_spin`, in the middle of which the wait should end. Zero where waits
  // are no longer than `longest_spin`; Duration::max() where their lengths vary too much to predict.
  [[nodiscard]] Duration initial_sleep(Duration longest_spin) const noexcept {
    if (last_ < longest_spin) return Duration(0);
    return steady_ ? last_ - longest_spin / 2 : Duration::max();
  }
  void note(Duration waited, Duration longest_spin) noexcept {
    steady_ = std::chrono::abs(waited - last_) < longest_spin / 2;
    last_ = waited;
  }

 private:
  Duration last_{0};
  bool steady_ = false;
};

// The histories of one waiter, by microbatch: steps resemble each other, with long waits at their beginning and end and
// short ones in between.
class WaitHistories {
 public:
  [[nodiscard]] WaitHistory& of(std::uint32_t microbatch) {
    const std::size_t place = microbatch % most;
    if (place >= places_.size()) places_.resize(place + 1);
    return places_[place];
  }

 private:
  static constexpr std::uint32_t most = 4096;
  std::vector<WaitHistory> places_;
};

// Wakes the threads that sleep at the bell. Call it after publishing the data with a release store.
void notify(Doorbell& bell) noexcept;

// Wakes the threads that sleep at the bell or are about to.
void ring(Doorbell& bell) noexcept;

namespace detail {
// Parks until the bell rings, `deadline` passes, or 100 ms are over.
void park(Doorbell& bell, std::uint32_t seen, std::chrono::steady_clock::time_point deadline) noexcept;
void relax() noexcept;
// Lets threads that are ready to use this core run first.
void yield() noexcept;
}  // namespace detail

namespace detail {

template <class Ready>
bool poll(const WaitPolicy& policy, Ready& ready) {
  for (std::uint32_t spin = 0; spin < policy.spins; ++spin) {
    relax();
    if (ready()) return true;
  }
  return false;
}

template <class Ready>
bool poll_on(const WaitPolicy& policy, Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + policy.longest_spin;
  while (std::chrono::steady_clock::now() < end) {
    for (int spin = 0; spin < 32; ++spin) {  // the clock costs as much as a few polls
      relax();
      if (ready()) return true;
    }
    yield();
  }
  return false;
}

// Parks until ready() holds, or until `wake_at` at the latest. Returns whether ready() holds.
template <class Ready, class Check>
bool sleep(Doorbell& bell, const WaitPolicy& policy, std::chrono::steady_clock::time_point start, Ready& ready,
           Check& check_failure,
           std::chrono::steady_clock::time_point wake_at = std::chrono::steady_clock::time_point::max()) {
  auto deadline = start + policy.timeout;
  const struct Sleeper {
    explicit Sleeper(Doorbell& at) noexcept : bell(at) { bell.sleepers.fetch_add(1, std::memory_order_seq_cst); }
    ~Sleeper() { bell.sleepers.fetch_sub(1, std::memory_order_relaxed); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    Doorbell& bell;
  } sleeper(bell);
  for (;;) {
    const std::uint32_t seen = bell.rings.load(std::memory_order_acquire);
    if (ready()) return true;
    try {
      check_failure();
    } catch (...) {
      if (ready()) return true;  // published before the failure: it still counts
      throw;
    }
    if (policy.interruption) policy.interruption();
    const auto now = std::chrono::steady_clock::now();
    if (now >= wake_at) return ready();
    if (now >= deadline) {
      if (ready()) return true;
      if (!policy.prolong || !policy.prolong()) return ready();
      deadline = now + policy.timeout;
    }
    park(bell, seen, std::min(deadline, wake_at));
  }
}

}  // namespace detail

// Returns true once ready() holds, false when the timeout has passed. `check_failure()` is called before parking and
// after each wake-up, and throws when there is no point in waiting; data published before the failure is still delivered.
template <class Ready, class Check>
[[nodiscard]] bool await(Doorbell& bell, const WaitPolicy& policy, Ready ready, Check check_failure) {
  return ready() || detail::poll(policy, ready) ||
         detail::sleep(bell, policy, std::chrono::steady_clock::now(), ready, check_failure);
}

// The same for a repeated wait: polls when its history says that the wait is about to end.
template <class Ready, class Check>
[[nodiscard]] bool await(Doorbell& bell, const WaitPolicy& policy, WaitHistory& history, Ready ready,
                         Check check_failure) {
  if (ready()) {
    history.note(WaitHistory::Duration(0), policy.longest_spin);
    return true;
  }
  const auto start = std::chrono::steady_clock::now();
  const auto pause = history.initial_sleep(policy.longest_spin);
  const bool polls = pause != WaitHistory::Duration::max();
  bool came = detail::poll(policy, ready);
  if (!came && polls && pause > WaitHistory::Duration(0))
    came = detail::sleep(bell, policy, start, ready, check_failure, start + pause);
  if (!came && polls) came = detail::poll_on(policy, ready);
  if (!came) came = detail::sleep(bell, policy, start, ready, check_failure);
  history.note(std::chrono::steady_clock::now() - start, policy.longest_spin);
  return came;
}

}  // namespace pypipe
