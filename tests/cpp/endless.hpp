// Makes parks endless, in a program that is linked with --wrap=syscall. Include it in one file of the program.
//
// The product parks for 100 ms at most, so that a lost wake-up would look like a pause. Here the linker replaces syscall()
// by __wrap_syscall, which removes the timeout of each FUTEX_WAIT: after a lost wake-up the program hangs, and the
// watchdog reports it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <cstdarg>

namespace pypipe::test {

inline std::atomic<bool> endless{true};

// While it exists, parks end after their 100 ms: for waits that are meant to time out.
struct WithTimeouts {
  WithTimeouts() { endless = false; }
  ~WithTimeouts() { endless = true; }
  WithTimeouts(const WithTimeouts&) = delete;
  WithTimeouts& operator=(const WithTimeouts&) = delete;
};

}  // namespace pypipe::test

// The names are the linker's.
extern "C" long __real_syscall(long number, ...);  // NOLINT
extern "C" long __wrap_syscall(long number, ...);  // NOLINT

extern "C" long __wrap_syscall(long number, ...) {  // NOLINT
  std::array<long, 6> values{};
  va_list list;
  va_start(list, number);
  for (long& value : values) value = va_arg(list, long);
  va_end(list);
  constexpr long operations = 0x7f;  // without flags such as FUTEX_PRIVATE_FLAG
  constexpr std::size_t timeout = 3;
  if (number == SYS_futex && (values[1] & operations) == FUTEX_WAIT && pypipe::test::endless) values[timeout] = 0;
  return __real_syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}
