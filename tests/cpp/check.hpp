// What the test programs share: checks that end the program, and a watchdog that tells where it hangs.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <source_location>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/wait.hpp"

namespace pypipe::test {

// Ends the program at once, from any thread: other threads may be waiting for something that never happens.
[[noreturn]] inline void fail(std::string_view what, std::source_location where = std::source_location::current()) {
  std::fprintf(stderr, "FAILED %s:%u: %.*s\n", where.file_name(), static_cast<unsigned>(where.line()),
               static_cast<int>(what.size()), what.data());
  std::_Exit(1);
}

inline void check(bool holds, std::string_view what, std::source_location where = std::source_location::current()) {
  if (!holds) fail(what, where);
}

template <class Left, class Right>
void check_equal(const Left& left, const Right& right, std::string_view what,
                 std::source_location where = std::source_location::current()) {
  if (left == right) return;
  fail(std::string(what) + ": " + std::to_string(left) + " is not " + std::to_string(right), where);
}

// Runs `action`, which must throw an Error, and returns it.
template <class Action>
Error error_of(Action action, std::string_view what, std::source_location where = std::source_location::current()) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    fail(std::string(what) + ": threw something else than Error: " + error.what(), where);
  }
  fail(std::string(what) + ": nothing was thrown", where);
}

template <class Action>
void expect(Fault fault, Action action, std::string_view what,
            std::source_location where = std::source_location::current()) {
  const Error error = error_of(action, what, where);
  if (error.fault() == fault) return;
  fail(
      std::string(what) + ": Error{" + name(error.fault()) + "} instead of Error{" + name(fault) + "}: " + error.what(),
      where);
}

namespace detail {
inline std::atomic<const char*> section{"the start"};

inline void hung(int /*signal*/) {
  // Only what a signal handler may call.
  constexpr std::string_view text = "FAILED: it hangs in: ";
  const char* where = section.load();
  (void)!::write(STDERR_FILENO, text.data(), text.size());
  (void)!::write(STDERR_FILENO, where, std::strlen(where));
  (void)!::write(STDERR_FILENO, "\n", 1);
  std::_Exit(3);
}
}  // namespace detail

// Names the section that runs now, which counts as hung after `seconds`. Generous: no test depends on speed.
inline void begin(const char* section, unsigned seconds = 30) {
  detail::section = section;
  std::signal(SIGALRM, &detail::hung);
  ::alarm(seconds);
}

inline WaitPolicy policy(std::chrono::nanoseconds timeout = std::chrono::seconds(30), std::uint32_t spins = 0) {
  WaitPolicy result;
  result.timeout = timeout;
  result.spins = spins;
  return result;
}

// splitmix64: small, good enough, and the same everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // A number below `bound`, which is not 0.
  std::uint64_t below(std::uint64_t bound) noexcept { return next() % bound; }
  bool once_in(std::uint64_t times) noexcept { return below(times) == 0; }

 private:
  std::uint64_t state_;
};

// The argument at `index` as a number, or `otherwise` if it is missing.
inline std::uint64_t argument(int count, char** values, int index, std::uint64_t otherwise) {
  if (index >= count) return otherwise;
  const std::string_view text = values[index];
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(error == std::errc() && end == text.data() + text.size(), "arguments are whole numbers");
  return value;
}

}  // namespace pypipe::test
