// Looks for lost wake-ups in base/wait.hpp. Arguments: seed, rounds.
//
// The product parks in slices, which would hide a lost wake-up as a pause. Here the linker puts
// __wrap_syscall in front of syscall(), and it takes the timeout off each FUTEX_WAIT: a lost wake-up hangs,
// and the watchdog tells.
#include <linux/futex.h>
#include <sys/syscall.h>

#include <cstdarg>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {
std::atomic<bool> endless{true};
}  // namespace

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
  if (number == SYS_futex && (values[1] & operations) == FUTEX_WAIT && endless) values[3] = 0;
  return __real_syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

namespace pypipe::test {
namespace {

constexpr auto no_trouble = [] {};
constexpr std::chrono::hours ages{1};

// Anything from nothing to about the time that a park takes, so that all interleavings get their chance.
void dawdle(Random& random) {
  const std::uint64_t polls = random.below(4) == 0 ? random.below(3000) : random.below(60);
  for (std::uint64_t i = 0; i < polls; ++i) pypipe::detail::relax();
}

// Two threads, two bells: each waits for the other's count.
void ping_pong(std::uint64_t seed, std::uint64_t rounds, std::uint32_t spins) {
  struct Side {
    Doorbell bell;
    alignas(64) std::atomic<std::uint64_t> count{0};
  };
  std::array<Side, 2> sides;
  const auto play = [&](std::size_t me) {
    Random random(seed * 2 + me);
    Side& mine = sides[me];
    Side& other = sides[1 - me];
    const Patience waiting = patience(ages, spins);
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      if (me == 1) {
        check(await(
                  mine.bell, waiting, [&] { return other.count.load(std::memory_order_acquire) >= round; },
                  no_trouble),
              "a ping never came");
      }
      dawdle(random);
      mine.count.store(round, std::memory_order_release);
      notify(other.bell);
      if (me == 0) {
        check(await(
                  mine.bell, waiting, [&] { return other.count.load(std::memory_order_acquire) >= round; },
                  no_trouble),
              "a pong never came");
      }
    }
  };
  std::thread second([&] { play(1); });
  play(0);
  second.join();
  check_equal(sides[0].bell.sleepers.load() + sides[1].bell.sleepers.load(), 0U, "sleepers that are left");
}

// Many waiters at one bell, each for something of its own, and two notifiers.
void crowd(std::uint64_t seed, std::uint64_t rounds) {
  constexpr std::size_t waiters = 4;
  Doorbell bell;
  Doorbell answers;
  struct alignas(64) Count {
    std::atomic<std::uint64_t> value{0};
  };
  std::array<Count, waiters> asked;
  std::array<Count, waiters> answered;
  std::vector<std::thread> threads;
  for (std::size_t me = 0; me < waiters; ++me) {
    threads.emplace_back([&, me] {
      Random random(seed * 100 + me);
      for (std::uint64_t round = 1; round <= rounds; ++round) {
        check(await(
                  bell, patience(ages),
                  [&] { return asked[me].value.load(std::memory_order_acquire) >= round; }, no_trouble),
              "a waiter in the crowd was forgotten");
        dawdle(random);
        answered[me].value.store(round, std::memory_order_release);
        notify(answers);
      }
    });
  }
  for (std::size_t notifier = 0; notifier < 2; ++notifier) {
    threads.emplace_back([&, notifier] {
      Random random(seed * 100 + 50 + notifier);
      for (std::uint64_t round = 1; round <= rounds; ++round) {
        for (std::size_t to = notifier; to < waiters; to += 2) {
          dawdle(random);
          asked[to].value.store(round, std::memory_order_release);
          notify(bell);
        }
        const auto all = [&] {
          for (std::size_t to = notifier; to < waiters; to += 2) {
            if (answered[to].value.load(std::memory_order_acquire) < round) return false;
          }
          return true;
        };
        check(await(answers, patience(ages), all, no_trouble), "an answer never came");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check_equal(bell.sleepers.load() + answers.sleepers.load(), 0U, "sleepers that are left");
}

// Trouble is announced by ring() alone, and nothing else ever happens.
void trouble(std::uint64_t seed, std::uint64_t rounds) {
  Doorbell bell;
  Doorbell back;
  std::atomic<std::uint64_t> troubles{0};
  std::atomic<std::uint64_t> noticed{0};
  std::thread waiter([&] {
    Random random(seed);
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      dawdle(random);
      const auto trouble = [&] {
        if (troubles.load(std::memory_order_acquire) >= round) throw Error(Fault::aborted, "trouble");
      };
      expect(
          Fault::aborted, [&] { (void)await(bell, patience(ages), [] { return false; }, trouble); },
          "waiting for nothing");
      noticed.store(round, std::memory_order_release);
      notify(back);
    }
  });
  Random random(seed + 1);
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    dawdle(random);
    troubles.store(round, std::memory_order_release);
    ring(bell);
    check(await(
              back, patience(ages), [&] { return noticed.load(std::memory_order_acquire) >= round; },
              no_trouble),
          "trouble was not noticed");
  }
  waiter.join();
}

void edges() {
  Doorbell bell;
  const auto never = [] { return false; };
  const auto raise = [] { throw Error(Fault::peer_gone, "gone"); };

  // Published before the trouble: it still counts, even if it is seen only after it.
  bool published = false;
  const auto publish_and_raise = [&] {
    published = true;
    throw Error(Fault::peer_gone, "gone");
  };
  check(await(bell, patience(ages), [&] { return published; }, publish_and_raise), "a last message was lost");
  check(await(bell, patience(ages), [] { return true; }, raise), "trouble hid what was ready");
  expect(Fault::peer_gone, [&] { (void)await(bell, patience(ages), never, raise); }, "trouble at once");

  // An interruption ends the wait; nobody stays counted as a sleeper.
  Patience interrupted = patience(ages, 10);
  interrupted.interruption = [] { throw Error(Fault::usage, "interrupted"); };
  expect(Fault::usage, [&] { (void)await(bell, interrupted, never, no_trouble); }, "an interruption");
  check_equal(bell.sleepers.load(), 0U, "sleepers after exceptions");

  endless = false;
  const auto before = std::chrono::steady_clock::now();
  check(!await(bell, patience(std::chrono::milliseconds(250), 10), never, no_trouble), "no timeout");
  check(std::chrono::steady_clock::now() - before >= std::chrono::milliseconds(250), "a timeout came early");
  check(!await(bell, patience(std::chrono::nanoseconds(0)), never, no_trouble), "no timeout of nothing");
  check(await(
            bell, patience(std::chrono::nanoseconds(0)), [] { return true; }, no_trouble),
        "ready at the deadline");

  // A waiter that is interrupted now and then gets its interruption called although nothing rings.
  int calls = 0;
  Patience patient = patience(ages);
  patient.interruption = [&] {
    if (++calls == 3) throw Error(Fault::usage, "third time");
  };
  expect(Fault::usage, [&] { (void)await(bell, patient, never, no_trouble); }, "interruptions while parked");
  endless = true;
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t seed = argument(count, values, 1, 1);
  const std::uint64_t rounds = argument(count, values, 2, 100'000);
  begin("edges");
  edges();
  begin("ping-pong without spinning: a lost wake-up", 120);
  ping_pong(seed, rounds, 0);
  begin("ping-pong with a short spin: a lost wake-up", 120);
  ping_pong(seed + 1, rounds, 30);
  begin("a crowd at one bell: a lost wake-up", 120);
  crowd(seed, rounds / 4);
  begin("trouble: a lost wake-up", 120);
  trouble(seed, rounds / 2);
  std::printf("doorbell_stress: seed %llu, %llu rounds of ping-pong, %llu in a crowd, %llu troubles\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(2 * rounds),
              static_cast<unsigned long long>(rounds / 4), static_cast<unsigned long long>(rounds / 2));
}
