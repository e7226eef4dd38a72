#include "base/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace pypipe {
namespace {

// Long enough to cost nothing, short enough to notice soon a signal that another thread took.
constexpr std::chrono::milliseconds slice{100};

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) noexcept {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void ring(Doorbell& bell) noexcept {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex(bell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void notify(Doorbell& bell) noexcept {
  if (bell.sleepers.fetch_add(0, std::memory_order_seq_cst) != 0) ring(bell);
}

namespace detail {

void park(Doorbell& bell, std::uint32_t seen, std::chrono::steady_clock::time_point deadline) noexcept {
  using std::chrono::nanoseconds;
  const nanoseconds left = deadline - std::chrono::steady_clock::now();
  const nanoseconds pause = std::clamp(left, nanoseconds(0), nanoseconds(slice));
  timespec timeout{};
  timeout.tv_sec = static_cast<std::time_t>(pause.count() / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(pause.count() % 1'000'000'000);
  futex(bell.rings, FUTEX_WAIT, seen, &timeout);
}

void yield() noexcept { ::sched_yield(); }

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace detail
}  // namespace pypipe
