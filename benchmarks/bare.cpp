// The floors of the link benchmark, with nothing in the way:
//   bare pingpong spin|futex COUNT   two processes and one word of shared memory each way; prints µs one way
//   (median) bare memcpy BYTES COUNT          one process copies into two slots of a memfd in turn; prints
//   GB/s (median of 5)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Words {
  alignas(64) std::atomic<std::uint32_t> there{0};
  alignas(64) std::atomic<std::uint32_t> back{0};
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

void* shared(std::size_t bytes) {
  const int descriptor = ::memfd_create("bare", 0);
  if (descriptor < 0 || ::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) std::abort();
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (memory == MAP_FAILED) std::abort();
  return memory;
}

void set(std::atomic<std::uint32_t>& word, std::uint32_t value, bool parks) {
  word.store(value, std::memory_order_release);
  if (parks) ::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void await(std::atomic<std::uint32_t>& word, std::uint32_t value, bool parks) {
  for (;;) {
    const std::uint32_t seen = word.load(std::memory_order_acquire);
    if (seen == value) return;
    if (parks) ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
  }
}

int pingpong(bool parks, std::uint32_t count) {
  auto* words = new (shared(sizeof(Words))) Words;
  const pid_t child = ::fork();
  if (child == 0) {
    for (std::uint32_t round = 1; round <= count; ++round) {
      await(words->there, round, parks);
      set(words->back, round, parks);
    }
    ::_exit(0);
  }
  std::vector<double> times;
  for (std::uint32_t round = 1; round <= count; ++round) {
    const auto start = Clock::now();
    set(words->there, round, parks);
    await(words->back, round, parks);
    times.push_back(seconds_since(start) / 2 * 1e6);
  }
  ::waitpid(child, nullptr, 0);
  std::printf("%.4f\n", median(times));
  return 0;
}

int copies(std::size_t bytes, std::size_t count) {
  constexpr std::size_t slots = 2;
  auto* target = static_cast<char*>(shared(slots * bytes));
  std::vector<char> source(bytes, 1);
  std::vector<double> rates;
  for (int round = 0; round < 6; ++round) {  // the first warms up
    const auto start = Clock::now();
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(target + i % slots * bytes, source.data(), bytes);
      asm volatile("" ::: "memory");
    }
    if (round > 0) rates.push_back(static_cast<double>(bytes * count) / seconds_since(start) / 1e9);
  }
  std::printf("%.4f\n", median(rates));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc == 4 ? argv[1] : "";
  if (mode == "pingpong") {
    return pingpong(std::string_view(argv[2]) == "futex", static_cast<std::uint32_t>(std::atol(argv[3])));
  }
  if (mode == "memcpy") {
    return copies(static_cast<std::size_t>(std::atoll(argv[2])), static_cast<std::size_t>(std::atoll(argv[3])));
  }
  std::fputs("usage: bare pingpong spin|futex COUNT | bare memcpy BYTES COUNT\n", stderr);
  return 2;
}
