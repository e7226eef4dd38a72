// Waiting for another thread or process: spin briefly, then park on a futex; never for ever, never deaf.
//
// Protocol of a Doorbell (it may lie in shared memory):
//   waiter   1. sleepers += 1           (seq_cst, once per wait)
//            2. seen = rings            (acquire)
//            3. ready()? or trouble?    -> leave
//            4. FUTEX_WAIT(rings, seen) -> returns at once if rings != seen; then again from 2
//   notifier 1. publish the data        (release store that ready() reads with acquire)
//            2. sleepers += 0           (seq_cst: a read-modify-write, not a load)
//            3. it was not 0?           -> rings += 1, FUTEX_WAKE
// All changes of `sleepers` have one order. Where the waiter's comes first, the notifier sees it and rings;
// where the notifier's comes first, the waiter's reads from it, so its ready() sees the data. A ring after
// the waiter's step 2 changes the futex word, so no wake-up is lost. `trouble` (a peer died, an abort
// arrived) is announced by ring() without looking at sleepers: the waiter sees it in step 3, or the futex
// word has changed.
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

// How long and how eagerly to wait. `interruption` is called now and then while waiting and may throw
// (Ctrl-C). `prolong` is called when the timeout has passed, and says whether to wait as long again.
struct Patience {
  std::chrono::nanoseconds timeout{std::chrono::minutes(10)};
  std::uint32_t spins = 0;                   // polls before parking; few where ranks outnumber cores
  std::chrono::nanoseconds longest_spin{0};  // for how long a waiter polls whose wait should be about to end
  std::function<void()> interruption;
  std::function<bool()> prolong;
};

// How long one waiter's waits at one place of a step take. To be woken costs a hundred microseconds where the core has
// gone idle, and the one who wakes some tens, so a waiter polls when its wait is about to end; polling through a wait
// of many milliseconds would keep the core from others. Private to the waiter.
class Habit {
 public:
  using Duration = std::chrono::nanoseconds;

  // How long to sleep before polling for `longest_spin`, which the wait's end is expected in the middle of. Nothing
  // where waits are no longer than that; for ever where they take now this long, now that.
  [[nodiscard]] Duration nap(Duration longest_spin) const noexcept {
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

// A waiter's habits, by microbatch: steps are alike, long waits at their begin and end, short ones in between.
class Habits {
 public:
  [[nodiscard]] Habit& of(std::uint32_t microbatch) {
    const std::size_t place = microbatch % most;
    if (place >= places_.size()) places_.resize(place + 1);
    return places_[place];
  }

 private:
  static constexpr std::uint32_t most = 4096;
  std::vector<Habit> places_;
};

// Wakes whoever sleeps at the bell. Call after publishing the data with a release store.
void notify(Doorbell& bell) noexcept;

// Wakes whoever sleeps at the bell or is about to.
void ring(Doorbell& bell) noexcept;

namespace detail {
// Parks until the bell rings or `deadline` or a slice of 100 ms is over.
void park(Doorbell& bell, std::uint32_t seen, std::chrono::steady_clock::time_point deadline) noexcept;
void relax() noexcept;
// Lets others that are ready for this core run first.
void yield() noexcept;
}  // namespace detail

namespace detail {

template <class Ready>
bool poll(const Patience& patience, Ready& ready) {
  for (std::uint32_t spin = 0; spin < patience.spins; ++spin) {
    relax();
    if (ready()) return true;
  }
  return false;
}

template <class Ready>
bool poll_on(const Patience& patience, Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + patience.longest_spin;
  while (std::chrono::steady_clock::now() < end) {
    for (int spin = 0; spin < 32; ++spin) {  // the clock costs as much as a few polls
      relax();
      if (ready()) return true;
    }
    yield();
  }
  return false;
}

// Until `morning`, if that comes first. Returns whether ready() holds.
template <class Ready, class Trouble>
bool sleep(Doorbell& bell, const Patience& patience, std::chrono::steady_clock::time_point start, Ready& ready,
           Trouble& trouble,
           std::chrono::steady_clock::time_point morning = std::chrono::steady_clock::time_point::max()) {
  auto deadline = start + patience.timeout;
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
      trouble();
    } catch (...) {
      if (ready()) return true;  // published before the trouble: it still counts
      throw;
    }
    if (patience.interruption) patience.interruption();
    const auto now = std::chrono::steady_clock::now();
    if (now >= morning) return ready();
    if (now >= deadline) {
      if (ready()) return true;
      if (!patience.prolong || !patience.prolong()) return ready();
      deadline = now + patience.timeout;
    }
    park(bell, seen, std::min(deadline, morning));
  }
}

}  // namespace detail

// Returns true once ready() holds, false when the timeout has passed. `trouble()` is called before parking
// and after each wake-up, and throws when waiting has become pointless; what was published before is still
// delivered.
template <class Ready, class Trouble>
[[nodiscard]] bool await(Doorbell& bell, const Patience& patience, Ready ready, Trouble trouble) {
  return ready() || detail::poll(patience, ready) ||
         detail::sleep(bell, patience, std::chrono::steady_clock::now(), ready, trouble);
}

// The same, for a waiter that comes again and again: it polls when its wait should be about to end.
template <class Ready, class Trouble>
[[nodiscard]] bool await(Doorbell& bell, const Patience& patience, Habit& habit, Ready ready, Trouble trouble) {
  if (ready()) {
    habit.note(Habit::Duration(0), patience.longest_spin);
    return true;
  }
  const auto start = std::chrono::steady_clock::now();
  const auto nap = habit.nap(patience.longest_spin);
  const bool polls = nap != Habit::Duration::max();
  bool came = detail::poll(patience, ready);
  if (!came && polls && nap > Habit::Duration(0))
    came = detail::sleep(bell, patience, start, ready, trouble, start + nap);
  if (!came && polls) came = detail::poll_on(patience, ready);
  if (!came) came = detail::sleep(bell, patience, start, ready, trouble);
  habit.note(std::chrono::steady_clock::now() - start, patience.longest_spin);
  return came;
}

}  // namespace pypipe
