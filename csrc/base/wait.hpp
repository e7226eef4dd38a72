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

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace pypipe {

struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleepers{0};
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// How long and how eagerly to wait. `interruption` is called now and then while waiting and may throw
// (Ctrl-C).
struct Patience {
  std::chrono::nanoseconds timeout{std::chrono::minutes(10)};
  std::uint32_t spins = 0;  // polls before parking; 0 where ranks outnumber cores
  std::function<void()> interruption;
};

// Wakes whoever sleeps at the bell. Call after publishing the data with a release store.
void notify(Doorbell& bell) noexcept;

// Wakes whoever sleeps at the bell or is about to.
void ring(Doorbell& bell) noexcept;

namespace detail {
// Parks until the bell rings or `deadline` or a slice of 100 ms is over.
void park(Doorbell& bell, std::uint32_t seen, std::chrono::steady_clock::time_point deadline) noexcept;
void relax() noexcept;
}  // namespace detail

// Returns true once ready() holds, false when the timeout has passed. `trouble()` is called before parking
// and after each wake-up, and throws when waiting has become pointless; what was published before is still
// delivered.
template <class Ready, class Trouble>
[[nodiscard]] bool await(Doorbell& bell, const Patience& patience, Ready ready, Trouble trouble) {
  if (ready()) return true;
  for (std::uint32_t spin = 0; spin < patience.spins; ++spin) {
    detail::relax();
    if (ready()) return true;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience.timeout;
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
    if (std::chrono::steady_clock::now() >= deadline) return ready();
    detail::park(bell, seen, deadline);
  }
}

}  // namespace pypipe
