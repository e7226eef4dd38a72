// Looks for lost wake-ups in base/wait.hpp. Arguments: seed, rounds of the fastest part.
// Parks are endless here: see endless.hpp.
#include <limits>
#include <thread>
#include <vector>

#include "check.hpp"
#include "endless.hpp"

namespace pypipe::test {
namespace {

constexpr auto never_fails = [] {};
constexpr std::chrono::hours ages{1};

// From zero to about the time that a park takes, so that all interleavings can occur.
void dawdle(Random& random) {
  const std::uint64_t polls = random.below(4) == 0 ? random.below(3000) : random.below(60);
  for (std::uint64_t i = 0; i < polls; ++i) pypipe::detail::relax();
}

// A barrier for two threads that spin, so that both continue at the same moment.
class SpinBarrier {
 public:
  void arrive(std::size_t me, std::uint64_t round) noexcept {
    at_[me].value.store(round, std::memory_order_release);
    for (std::uint32_t polls = 1; at_[1 - me].value.load(std::memory_order_acquire) < round; ++polls) {
      if (polls % 500 == 0) std::this_thread::yield();
    }
  }

 private:
  struct alignas(64) Round {
    std::atomic<std::uint64_t> value{0};
  };
  std::array<Round, 2> at_;
};

// From a nanosecond to about a microsecond: the windows in which a wake-up could be lost are narrow, and their position
// depends on how fast the clock is read.
void hesitate(Random& random) {
  for (std::uint64_t i = random.below(std::uint64_t{16} << random.below(9)); i > 0; --i) asm volatile("" ::: "memory");
}

// A waiter begins to wait at the moment when a notifier announces data with notify(), or a failure with ring().
void duel(std::uint64_t seed, std::uint64_t rounds, bool with_failure) {
  Doorbell bell;
  SpinBarrier barrier;
  alignas(64) std::atomic<std::uint64_t> announced{0};
  std::thread notifier([&] {
    Random random(seed);
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      barrier.arrive(0, round);
      hesitate(random);
      announced.store(round, std::memory_order_release);
      if (with_failure) {
        ring(bell);
      } else {
        notify(bell);
      }
    }
  });
  Random random(seed + 1);
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    const auto now = [&] { return announced.load(std::memory_order_acquire) >= round; };
    barrier.arrive(1, round);
    hesitate(random);
    if (with_failure) {
      const auto failure = [&] {
        if (now()) throw Error(Fault::aborted, "the planted failure");
      };
      expect(
          Fault::aborted, [&] { (void)await(bell, policy(ages), [] { return false; }, failure); },
          "waiting for nothing");
    } else {
      check(await(bell, policy(ages), now, never_fails), "an announcement never came");
    }
  }
  notifier.join();
  check_equal(bell.sleepers.load(), 0U, "sleepers that are left");
}

// Two threads and two bells: each waits for the other's count.
void ping_pong(std::uint64_t seed, std::uint64_t rounds, std::uint32_t spins,
               std::chrono::nanoseconds longest_spin = std::chrono::nanoseconds(0)) {
  struct Side {
    Doorbell bell;
    alignas(64) std::atomic<std::uint64_t> count{0};
  };
  std::array<Side, 2> sides;
  const auto play = [&](std::size_t me) {
    Random random(seed * 2 + me);
    Side& mine = sides[me];
    Side& other = sides[1 - me];
    WaitPolicy waiting = policy(ages, spins);
    waiting.longest_spin = longest_spin;
    WaitHistory history;
    if (longest_spin > longest_spin.zero()) {  // as if all waits were long: sleeps, polls, then sleeps again
      for (int wait = 0; wait < 2; ++wait) history.note(4 * longest_spin, longest_spin);
    }
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      if (me == 1) {
        check(await(
                  mine.bell, waiting, history, [&] { return other.count.load(std::memory_order_acquire) >= round; },
                  never_fails),
              "a ping never came");
      }
      dawdle(random);
      mine.count.store(round, std::memory_order_release);
      notify(other.bell);
      if (me == 0) {
        check(await(
                  mine.bell, waiting, history, [&] { return other.count.load(std::memory_order_acquire) >= round; },
                  never_fails),
              "a pong never came");
      }
    }
  };
  std::thread second([&] { play(1); });
  play(0);
  second.join();
  check_equal(sides[0].bell.sleepers.load() + sides[1].bell.sleepers.load(), 0U, "sleepers that are left");
}

// Many waiters at one bell, each with its own condition, and two notifiers.
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
                  bell, policy(ages), [&] { return asked[me].value.load(std::memory_order_acquire) >= round; },
                  never_fails),
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
        check(await(answers, policy(ages), all, never_fails), "an answer never came");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check_equal(bell.sleepers.load() + answers.sleepers.load(), 0U, "sleepers that are left");
}

void edges() {
  Doorbell bell;
  const auto never = [] { return false; };
  const auto raise = [] { throw Error(Fault::peer_gone, "gone"); };

  // Published before the failure: it still counts, even if it is seen only after it.
  bool published = false;
  const auto publish_and_raise = [&] {
    published = true;
    throw Error(Fault::peer_gone, "gone");
  };
  check(await(bell, policy(ages), [&] { return published; }, publish_and_raise), "a last message was lost");
  check(await(bell, policy(ages), [] { return true; }, raise), "a failure hid what was ready");
  expect(Fault::peer_gone, [&] { (void)await(bell, policy(ages), never, raise); }, "a failure from the start");

  // An interruption ends the wait, and the waiter no longer counts as a sleeper.
  WaitPolicy interrupted = policy(ages, 10);
  interrupted.interruption = [] { throw Error(Fault::usage, "interrupted"); };
  expect(Fault::usage, [&] { (void)await(bell, interrupted, never, never_fails); }, "an interruption");
  check_equal(bell.sleepers.load(), 0U, "sleepers after exceptions");

  const WithTimeouts with_timeouts;
  const auto before = std::chrono::steady_clock::now();
  check(!await(bell, policy(std::chrono::milliseconds(250), 10), never, never_fails), "no timeout");
  check(std::chrono::steady_clock::now() - before >= std::chrono::milliseconds(250), "a timeout came early");
  check(!await(bell, policy(std::chrono::nanoseconds(0)), never, never_fails), "no timeout of nothing");
  check(await(bell, policy(std::chrono::nanoseconds(0)), [] { return true; }, never_fails), "ready at the deadline");

  // The interruption is called now and then although nothing rings.
  int calls = 0;
  WaitPolicy patient = policy(ages);
  patient.interruption = [&] {
    if (++calls == 3) throw Error(Fault::usage, "third time");
  };
  expect(Fault::usage, [&] { (void)await(bell, patient, never, never_fails); }, "interruptions while parked");
}

// A waiter polls when its wait is expected to end, and keeps a history for each place of a step.
void histories() {
  using std::chrono::milliseconds;
  constexpr milliseconds spin(2);
  constexpr auto never_polls = WaitHistory::Duration::max();
  const auto first_sleep = [&](const WaitHistory& history) { return history.initial_sleep(spin); };
  WaitHistories places;
  check(first_sleep(places.of(7)) == WaitHistory::Duration(0), "a new waiter does not poll");
  places.of(7).note(milliseconds(10), spin);
  check(first_sleep(places.of(7)) == never_polls, "a wait of unknown length is polled through");
  places.of(7).note(milliseconds(20), spin);
  check(first_sleep(places.of(7)) == never_polls, "a wait whose length changes is foreseen");
  places.of(7).note(milliseconds(20), spin);
  check(first_sleep(places.of(7)) == milliseconds(19), "a wait that is always as long is not foreseen");
  check(first_sleep(places.of(6)) == WaitHistory::Duration(0), "one place of a step tells of another");
  check(first_sleep(places.of(std::numeric_limits<std::uint32_t>::max())) == WaitHistory::Duration(0),
        "the last place is another");
  check(first_sleep(places.of(7)) == milliseconds(19), "a place was lost");
  Doorbell bell;
  check(await(bell, policy(ages), places.of(7), [] { return true; }, never_fails), "what is there is waited for");
  check(first_sleep(places.of(7)) == WaitHistory::Duration(0), "what was there at once was no short wait");
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t seed = argument(count, values, 1, 1);
  const std::uint64_t rounds = argument(count, values, 2, 500'000);
  begin("edges");
  edges();
  begin("a duel: a lost wake-up", 45);
  duel(seed, rounds, false);
  begin("a duel over a failure: a lost wake-up", 45);
  duel(seed + 10, rounds, true);
  // Each of these rounds costs several switches between threads.
  const std::uint64_t slow_rounds = rounds / 100;
  begin("ping-pong without spinning: a lost wake-up", 45);
  ping_pong(seed + 20, slow_rounds, 0);
  begin("ping-pong with a short spin: a lost wake-up", 45);
  ping_pong(seed + 30, slow_rounds, 30);
  // Waits take about as long as the limit, so that waiters alternate between polling and sleeping.
  begin("ping-pong with a spin by history: a lost wake-up", 45);
  ping_pong(seed + 35, slow_rounds, 30, std::chrono::microseconds(20));
  begin("histories");
  histories();
  begin("a crowd at one bell: a lost wake-up", 45);
  crowd(seed + 40, slow_rounds / 5);
  std::printf("doorbell_stress: seed %llu, %llu duels over data and over failures, %llu ping-pongs, %llu in a crowd\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(rounds),
              static_cast<unsigned long long>(3 * slow_rounds), static_cast<unsigned long long>(slow_rounds / 5));
}
