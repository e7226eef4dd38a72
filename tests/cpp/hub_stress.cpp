// Hubs: frames from many threads, and aborts, deaths and leaves while other threads wait. Arguments: seed, rounds.
// Parks are endless here: see endless.hpp.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "causes.hpp"
#include "check.hpp"
#include "control/hub.hpp"
#include "endless.hpp"
#include "sockets.hpp"

namespace pypipe::test {
namespace {

std::string text_of(std::uint64_t key, std::size_t bytes) {
  Random random(key);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random.next());
  return text;
}

// --- frames
// ----------------------------------------------------------------------------------------------------------

// Several senders each way, some of them of descriptors; the frames of each stay in order.
void frames(std::uint64_t seed, std::uint64_t count) {
  std::array<std::unique_ptr<Hub>, 2> hubs{std::make_unique<Hub>(0), std::make_unique<Hub>(1)};
  join(*hubs[0], *hubs[1]);
  hubs[0]->start();
  hubs[1]->start();
  constexpr std::uint32_t channels = 3;
  std::vector<std::thread> threads;
  const auto size_of = [](Random& random) { return random.once_in(100) ? random.below(300'000) : random.below(600); };
  for (int from = 0; from < 2; ++from) {
    for (std::uint32_t channel = 0; channel < channels; ++channel) {
      const std::uint64_t key = seed * 100 + static_cast<std::uint64_t>(from) * 10 + channel;
      threads.emplace_back([&, from, channel, key] {
        Random random(key);
        for (std::uint64_t i = 0; i < count; ++i) {
          if (random.once_in(20)) {
            const Fd file(check_errno(::memfd_create("hub_stress", MFD_CLOEXEC), "memfd_create"));
            check(::write(file.get(), &i, sizeof(i)) == sizeof(i), "write");
            hubs[static_cast<std::size_t>(from)]->send(1 - from, FrameType::memory, channel, i, {}, policy(),
                                                       file.get());
          }
          const std::string payload = text_of(key + i, size_of(random));
          hubs[static_cast<std::size_t>(from)]->send(1 - from, FrameType::layout, channel, i, payload, policy());
        }
      });
      threads.emplace_back([&, from, channel, key] {
        Random random(key);
        Hub& hub = *hubs[static_cast<std::size_t>(1 - from)];
        for (std::uint64_t i = 0; i < count; ++i) {
          if (random.once_in(20)) {
            const Frame frame = hub.take(from, FrameType::memory, channel, policy());
            std::uint64_t inside = 0;
            check(::pread(frame.descriptor.get(), &inside, sizeof(inside), 0) == sizeof(inside), "pread");
            check(frame.value == i && inside == i, "a descriptor came with another frame");
          }
          const Frame frame = hub.take(from, FrameType::layout, channel, policy());
          check_equal(frame.value, i, "frames changed places");
          check(frame.payload == text_of(key + i, size_of(random)), "a payload was damaged");
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  const WithTimeouts with_timeouts;
  expect(
      Fault::timeout, [&] { (void)hubs[0]->take(1, FrameType::layout, 0, policy(std::chrono::milliseconds(20))); },
      "no frame is left");
}

// --- failures
// --------------------------------------------------------------------------------------------------------

// Ranks 0 - 1 - 2 in a row.
struct Chain {
  Chain() {
    join(*hubs[0], *hubs[1]);
    join(*hubs[1], *hubs[2]);
    for (const auto& hub : hubs) hub->start();
  }
  std::array<std::unique_ptr<Hub>, 3> hubs{std::make_unique<Hub>(0), std::make_unique<Hub>(1),
                                           std::make_unique<Hub>(2)};
};

// Waits for a hub's cause as other threads do: in take().
Cause cause_of(Hub& hub, int peer) {
  (void)error_of([&] { (void)hub.take(peer, FrameType::envelope, 99, policy()); }, "the pipeline has failed");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!hub.cause()) {  // a peer's end may be noticed a moment before the failure
    check(std::chrono::steady_clock::now() < deadline, "a hub never learned the cause");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *hub.cause();
}

// One rank aborts, with two causes from two threads: all waiting threads wake, and all ranks have the same cause.
void aborts(std::uint64_t seed, std::uint64_t rounds) {
  Random random(seed);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Chain chain;
    constexpr std::array<std::pair<std::size_t, int>, 6> waits{{{0, 1}, {1, 0}, {1, 2}, {2, 1}, {1, 0}, {0, 1}}};
    Doorbell bell;  // of a thread that waits for something other than a frame
    chain.hubs[1]->watch(bell);
    std::vector<std::thread> threads;
    for (const auto& [at, peer] : waits) {
      threads.emplace_back([&chain, at, peer] {
        expect(
            Fault::aborted, [&] { (void)chain.hubs[at]->take(peer, FrameType::layout, 1, policy()); },
            "a waiting take");
      });
    }
    threads.emplace_back([&] {
      expect(
          Fault::aborted, [&] { (void)await(bell, policy(), [] { return false; }, [&] { chain.hubs[1]->check(2); }); },
          "a waiting link");
    });
    Hub& origin = *chain.hubs[random.below(3)];
    if (random.once_in(2)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(500)));
    std::thread other([&] { origin.abort(failure("second")); });
    origin.abort(failure("first"));
    other.join();
    for (std::thread& thread : threads) thread.join();
    origin.abort(failure("late"));
    const std::string cause = origin.cause()->message;
    check(cause == "first" || cause == "second", "another cause: " + cause);
    for (const auto& hub : chain.hubs) check(hub->cause()->message == cause, "causes differ: " + hub->cause()->message);
    expect(
        Fault::aborted, [&] { chain.hubs[0]->send(1, FrameType::layout, 0, 0, {}, policy()); },
        "sending after a failure");
    chain.hubs[1]->unwatch(bell);
  }
}

// Both ends of the chain fail at once: each rank ends up with one of the two causes, and none hangs.
void crossing_aborts(std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Chain chain;
    std::thread left([&] { chain.hubs[0]->abort(failure("left")); });
    std::thread right([&] { chain.hubs[2]->abort(failure("right")); });
    left.join();
    right.join();
    for (std::size_t at = 0; at < 3; ++at) {
      const std::string cause = cause_of(*chain.hubs[at], at == 1 ? 0 : 1).message;
      check(cause == "left" || cause == "right", "another cause: " + cause);
    }
  }
}

// A peer's socket closes without a leave frame: its neighbours fail and name the lost rank, and so do theirs.
void death(std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Hub middle(1);
    Hub end(2);
    auto [mine, dying] = socket_pair();
    middle.add_peer(0, std::move(mine));
    join(middle, end);
    middle.start();
    end.start();
    const auto wait = [](Hub& hub, int peer) {
      const Error error =
          error_of([&] { (void)hub.take(peer, FrameType::layout, 1, policy()); }, "waiting beside a death");
      check(error.fault() == Fault::aborted || error.fault() == Fault::peer_gone, "another error at a death");
    };
    std::vector<std::thread> threads;
    threads.emplace_back([&] { wait(middle, 0); });
    threads.emplace_back([&] { wait(middle, 2); });
    threads.emplace_back([&] { wait(end, 1); });
    // Whole frames that arrived before the death can still be taken.
    const auto header = encode_header(FrameType::layout, 5, 77, 4);
    check(::write(dying.get(), header.data(), header.size()) == ssize_t{frame_header_bytes}, "write");
    check(::write(dying.get(), "last", 4) == 4, "write");
    if (round % 2 == 0) check(::write(dying.get(), header.data(), 10) == 10, "write");
    dying.reset();
    for (std::thread& thread : threads) thread.join();
    for (Hub* hub : {&middle, &end}) {
      check_lost(cause_of(*hub, hub == &end ? 1 : 0), 0, 1);
    }
    check(middle.take(0, FrameType::layout, 5, policy()).payload == "last", "a last frame was lost");
    expect(Fault::aborted, [&] { (void)middle.take(0, FrameType::layout, 5, policy()); }, "no more frames");
  }
}

// Bytes that are not a frame: the pipeline fails, and the socket of the peer that sent them ends.
void garbage(std::uint64_t seed) {
  Random random(seed);
  for (int round = 0; round < 10; ++round) {
    Hub hub(0);
    auto [mine, liar] = socket_pair();
    hub.add_peer(1, std::move(mine));
    hub.start();
    const std::string noise = text_of(random.next(), 24 + random.below(3000));
    check(::send(liar.get(), noise.data(), noise.size(), MSG_NOSIGNAL) > 0, "send");
    check_lost(cause_of(hub, 1), 1, 0);
    pollfd wait{liar.get(), POLLIN, 0};
    check(::poll(&wait, 1, 30'000) == 1, "a peer that sent garbage is left waiting");
  }
}

// --- leaving
// -------------------------------------------------------------------------------------------------------

// A leave wakes the threads that wait for that peer; frames sent before it can be read, and the pipeline has not failed.
void leave(std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Chain chain;
    std::thread waiter([&] {
      expect(
          Fault::peer_gone, [&] { (void)chain.hubs[1]->take(0, FrameType::layout, 1, policy()); },
          "waiting for one that leaves");
    });
    for (std::uint64_t i = 0; i < 20; ++i) {
      chain.hubs[0]->send(1, FrameType::envelope, 2, i, text_of(i, 100), policy());
    }
    chain.hubs[0]->close();
    waiter.join();
    for (std::uint64_t i = 0; i < 20; ++i) {
      const Frame frame = chain.hubs[1]->take(0, FrameType::envelope, 2, policy());
      check(frame.value == i && frame.payload == text_of(i, 100), "a frame sent before the leave was damaged");
    }
    expect(
        Fault::peer_gone, [&] { (void)chain.hubs[1]->take(0, FrameType::envelope, 2, policy()); },
        "nothing more comes");
    expect(
        Fault::peer_gone, [&] { chain.hubs[1]->send(0, FrameType::envelope, 2, 0, {}, policy()); },
        "sending to one that left");
    check(!chain.hubs[1]->cause() && !chain.hubs[2]->cause(), "a leave counted as a failure");
    // The other ranks continue.
    chain.hubs[2]->send(1, FrameType::envelope, 3, 4, "still here", policy());
    check(chain.hubs[1]->take(2, FrameType::envelope, 3, policy()).payload == "still here", "the chain broke");
    chain.hubs[2]->abort(failure("later"));
    check(cause_of(*chain.hubs[1], 2).message == "later", "no failure after a leave");
    for (const auto& hub : chain.hubs) hub->close();
    for (const auto& hub : chain.hubs) hub->close();
  }
}

// close() in one thread wakes the waiting threads of the same rank.
void close_while_waiting(std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Hub left(0);
    Hub right(1);
    join(left, right);
    left.start();
    right.start();
    Doorbell bell;
    left.watch(bell);
    std::thread taker([&] {
      expect(Fault::peer_gone, [&] { (void)left.take(1, FrameType::layout, 1, policy()); }, "take() beside close()");
    });
    std::thread link([&] {
      expect(
          Fault::peer_gone, [&] { (void)await(bell, policy(), [] { return false; }, [&] { left.check(1); }); },
          "a link beside close()");
    });
    std::thread sender([&] {  // at any moment, this is an error and not a crash
      (void)error_of(
          [&] {
            for (;;) left.send(1, FrameType::envelope, 1, 0, "x", policy());
          },
          "send() beside close()");
    });
    std::thread reader([&] {
      expect(
          Fault::peer_gone,
          [&] {
            for (;;) (void)right.take(0, FrameType::envelope, 1, policy());
          },
          "the other end of close()");
    });
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    left.close();
    for (std::thread* thread : {&taker, &link, &sender, &reader}) thread->join();
    left.unwatch(bell);
    expect(Fault::usage, [&] { left.add_peer(2, socket_pair().first); }, "add_peer() after close()");
    expect(Fault::usage, [&] { left.start(); }, "start() after close()");
  }
}

// --- a peer that does not read
// ---------------------------------------------------------------------------------------

// A hub whose peer is a bare socket.
struct Deaf {
  Deaf() {
    auto [mine, theirs] = socket_pair();
    socket = std::move(theirs);
    hub.add_peer(1, std::move(mine));
    hub.start();
  }
  // Sends until the socket is full and the sender is stuck in the middle of a frame.
  void fill(const WaitPolicy& waiting) {
    const std::string payload(*limit(FrameType::layout), 'x');
    for (;;) hub.send(1, FrameType::layout, 1, 0, payload, waiting);
  }
  // All that the hub wrote until its socket closed: whole frames, except that the last one may be cut short.
  [[nodiscard]] std::vector<Frame> read_all() const {
    FrameReader reader;
    std::vector<Frame> frames;
    std::vector<std::byte> buffer(1 << 16);
    for (;;) {
      const ssize_t got = ::read(socket.get(), buffer.data(), buffer.size());
      if (got <= 0) return frames;
      reader.feed(std::span(buffer).first(static_cast<std::size_t>(got)));
      while (auto frame = reader.next()) frames.push_back(std::move(*frame));
    }
  }
  Hub hub{0};
  Fd socket;
};

void full_socket() {
  Deaf timed;
  expect(Fault::timeout, [&] { timed.fill(policy(std::chrono::milliseconds(100))); }, "a peer that does not read");

  Deaf interrupted;
  WaitPolicy with_interruption = policy();
  with_interruption.interruption = [] { throw Error(Fault::usage, "interrupted"); };
  expect(Fault::usage, [&] { interrupted.fill(with_interruption); }, "Ctrl-C while the socket is full");

  // close() and abort() return in time, whatever other threads are doing.
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  Deaf closed;
  std::thread first([&] { (void)error_of([&] { closed.fill(policy(std::chrono::minutes(5))); }, "close()"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  closed.hub.close();
  first.join();
  Deaf aborted;
  std::thread second(
      [&] { expect(Fault::aborted, [&] { aborted.fill(policy(std::chrono::minutes(5))); }, "abort()"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  aborted.hub.abort(failure("cause"));
  second.join();
  check(std::chrono::steady_clock::now() < soon, "close() or abort() waited for a sender");
}

// A failure while a large frame is being sent to a slow peer: the peer reads the cause, not garbage.
void abort_behind_a_large_frame(std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Deaf slow;
    std::thread sender([&] { (void)error_of([&] { slow.fill(policy()); }, "a sender beside abort()"); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // it is probably in the middle of a frame now
    std::vector<Frame> frames;
    std::thread reader([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      frames = slow.read_all();
    });
    slow.hub.abort(failure("the first cause"));
    sender.join();
    slow.hub.close();
    reader.join();
    const auto last =
        std::find_if(frames.begin(), frames.end(), [](const Frame& frame) { return frame.type == FrameType::abort; });
    check(last != frames.end() && Cause::decode(last->payload).message == "the first cause",
          "a slow peer never got the cause");
    for (const Frame& frame : frames) {
      if (frame.type != FrameType::layout) continue;
      check(std::all_of(frame.payload.begin(), frame.payload.end(), [](char c) { return c == 'x'; }),
            "one frame was written into another");
    }
  }
}

// After a send gave up in the middle of a frame, the peer must not take later bytes for the rest of that frame.
void nothing_after_half_a_frame() {
  Deaf slow;
  expect(Fault::timeout, [&] { slow.fill(policy(std::chrono::milliseconds(50))); }, "a peer that does not read");
  std::vector<Frame> frames;
  std::thread reader([&] { frames = slow.read_all(); });
  for (std::uint64_t i = 0; i < 40; ++i) {
    try {
      slow.hub.send(1, FrameType::layout, 2, i, std::string(100'000, 'y'), policy(std::chrono::seconds(5)));
    } catch (const Error&) {  // best: the connection counts as broken
      break;
    }
  }
  slow.hub.close();
  reader.join();
  for (const Frame& frame : frames) {
    const char letter = frame.channel == 1 ? 'x' : 'y';
    check(std::all_of(frame.payload.begin(), frame.payload.end(), [&](char c) { return c == letter; }),
          "one frame was written into another");
  }
}

// --- forks
// -----------------------------------------------------------------------------------------------------------

// A forked child that abandons its hub (a data loader's worker) does not hide its parent's death.
void fork_and_die() {
  auto [mine, theirs] = socket_pair();
  std::array<int, 2> end{};
  check_errno(::pipe2(end.data(), O_CLOEXEC), "pipe");
  const pid_t rank = check_errno(::fork(), "fork");
  if (rank == 0) {
    mine.reset();
    ::close(end[1]);
    auto* hub = new Hub(1);  // the process dies with it
    hub->add_peer(0, std::move(theirs));
    hub->start();
    (void)hub->take(0, FrameType::envelope, 0, policy());
    if (check_errno(::fork(), "fork") == 0) {
      hub->abandon();
      char byte = 0;
      (void)!::read(end[0], &byte, 1);  // until the test is over
      std::_Exit(0);
    }
    hub->send(0, FrameType::envelope, 0, 0, "forked", policy());
    std::_Exit(0);
  }
  theirs.reset();
  ::close(end[0]);
  Hub hub(0);
  hub.add_peer(1, std::move(mine));
  hub.start();
  hub.send(1, FrameType::envelope, 0, 0, "fork", policy());
  check(hub.take(1, FrameType::envelope, 0, policy()).payload == "forked", "no answer");
  check_lost(cause_of(hub, 1), 1, 0);
  int status = 0;
  check_errno(::waitpid(rank, &status, 0), "waitpid");
  check_equal(status, 0, "the status of the rank");
  ::close(end[1]);
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t seed = argument(count, values, 1, 1);
  const std::uint64_t rounds = argument(count, values, 2, 100);
  const std::size_t descriptors = open_descriptors();
  begin("a forked child that abandons its hub");
  fork_and_die();
  begin("frames", 45);
  frames(seed, rounds * 10);
  begin("aborts over a chain", 45);
  aborts(seed, rounds);
  begin("aborts from both ends", 45);
  crossing_aborts(rounds);
  begin("a death", 45);
  death(rounds);
  begin("garbage");
  garbage(seed);
  begin("a leave", 45);
  leave(rounds);
  begin("close() while others wait", 45);
  close_while_waiting(rounds);
  begin("a socket that is not read");
  full_socket();
  begin("an abort behind a large frame");
  abort_behind_a_large_frame(5);
  begin("what follows half a frame");
  nothing_after_half_a_frame();
  check_equal(open_descriptors(), descriptors, "descriptors open at the end");
  std::printf("hub_stress: seed %llu, %llu rounds\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(rounds));
}
