// The shared-memory link with peers that die, leave, or send what they should not.
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "causes.hpp"
#include "channel/channel.hpp"
#include "check.hpp"
#include "endless.hpp"
#include "link/shm/shm_link.hpp"
#include "sockets.hpp"

namespace pypipe::test {
namespace {

constexpr std::uint32_t channel = 3;
constexpr auto forward = static_cast<std::uint32_t>(ActionKind::F);
constexpr auto backward = static_cast<std::uint32_t>(ActionKind::B);

// Two hubs and a link of `slots` slots from the left one to the right one.
struct Ends {
  explicit Ends(std::uint32_t slots) {
    join(left, right);
    left.start();
    right.start();
    sender = std::make_unique<ShmSendLink>(left, 1, 0, slots, policy());
    receiver = std::make_unique<ShmReceiveLink>(right, 0, 0, slots, policy());
    sender->reserve(channel, slots, 4096, policy());
  }
  void send(std::uint32_t microbatch, std::uint64_t bytes = 8, const WaitPolicy& waiting = policy()) const {
    const std::vector<std::byte> data(bytes, static_cast<std::byte>(microbatch));
    Envelope envelope{channel, 1, forward, microbatch, 1, 0, bytes, 0, 0};
    const Part part{data.data(), data.size(), 0};
    WaitHistory history;
    sender->send(envelope, std::span(&part, 1), Stream{}, waiting, history);
  }
  [[nodiscard]] Arrival receive(const WaitPolicy& waiting = policy()) const {
    WaitHistory history;
    return receiver->receive(Stream{}, waiting, history);
  }
  Hub left{0};
  Hub right{1};
  std::unique_ptr<ShmSendLink> sender;
  std::unique_ptr<ShmReceiveLink> receiver;
};

const WaitPolicy moment = policy(std::chrono::milliseconds(50));

void waits() {
  const WithTimeouts with_timeouts;
  const Ends ends(2);
  expect(Fault::timeout, [&] { (void)ends.receive(moment); }, "nothing was sent");
  ends.send(0);
  ends.send(1);
  expect(Fault::timeout, [&] { ends.send(2, 8, moment); }, "no slot is free");
  const Arrival first = ends.receive();
  const Arrival second = ends.receive();
  check(first.envelope.microbatch == 0 && second.envelope.microbatch == 1, "messages changed places");
  ends.receiver->release(second.slot, Stream{});
  ends.send(2);
  const Arrival third = ends.receive();
  check_equal(third.slot.index, second.slot.index, "the slot that is reused");
  check(first.slot.data[0] == std::byte{0} && third.slot.data[0] == std::byte{2}, "a live slot was overwritten");
  expect(Fault::usage, [&] { ends.send(3, 4097); }, "a message larger than its slot");
}

// A received message stays readable after its link, its hub and its slots are gone.
void outlived() {
  Arrival kept;
  {
    const Ends ends(2);
    ends.send(5, 4096);
    kept = ends.receive();
    ends.sender->reserve(channel, 2, 100'000, policy());
    ends.send(6, 100'000);
    const Arrival larger = ends.receive();
    check(larger.slot.generation == 2 && larger.slot.bytes >= 100'000, "slots did not grow");
    ends.receiver->release(larger.slot, Stream{});
  }
  for (std::size_t i = 0; i < 4096; ++i) check(kept.slot.data[i] == std::byte{5}, "a kept message changed");
}

// Messages sent before a leave are delivered; then both ends report that the peer is gone.
void last_messages() {
  Ends ends(3);
  ends.send(0);
  ends.send(1);
  ends.left.close();
  check_equal(ends.receive().envelope.microbatch, 0U, "the first message after a leave");
  check_equal(ends.receive().envelope.microbatch, 1U, "the second message after a leave");
  expect(Fault::peer_gone, [&] { (void)ends.receive(); }, "nothing more will come");
  check(!ends.right.cause(), "a leave is no failure");

  // In the other direction, credits that were returned before a leave still count.
  Ends others(1);
  others.send(0);
  others.receiver->release(others.receive().slot, Stream{});
  others.right.close();
  others.send(1);
  expect(Fault::peer_gone, [&] { others.send(2); }, "no slot will come free");
}

// A waiting thread wakes when the pipeline fails, at either end.
void aborts(std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Ends ends(1);
    ends.send(0);
    // The message was sent, but it is lost if the frame that announced its slots has not been read yet.
    std::thread receiver([&] {
      expect(
          Fault::aborted,
          [&] {
            for (;;) (void)ends.receive();
          },
          "a receiver");
    });
    std::thread sender([&] { expect(Fault::aborted, [&] { ends.send(1); }, "a sender"); });
    if (round % 2 == 0) std::this_thread::yield();
    (round % 3 == 0 ? ends.left : ends.right).abort(failure("test"));
    receiver.join();
    sender.join();
  }
}

// A receiver that returns slots it does not have: the sender raises an error, and no slot in use is overwritten.
void false_credits() {
  const auto after = [](Slot forged, const char* what) {
    const Ends ends(2);
    ends.send(0);
    const Slot real = ends.receive().slot;
    forged.generation += real.generation;
    ends.receiver->release(forged, Stream{});
    expect(
        Fault::protocol,
        [&] {
          for (std::uint32_t microbatch = 1; microbatch < 4; ++microbatch) ends.send(microbatch, 8, moment);
        },
        what);
  };
  after(Slot{channel, 0, 2, nullptr, 0, nullptr}, "the index after the last slot");
  after(Slot{channel, 0, 1U << 30, nullptr, 0, nullptr}, "an index far away");
  after(Slot{channel, 0, std::numeric_limits<std::uint32_t>::max(), nullptr, 0, nullptr}, "the largest index");
  after(Slot{channel, 0, 1, nullptr, 0, nullptr}, "a slot that is free already");
  after(Slot{channel + 1, 0, 0, nullptr, 0, nullptr}, "a channel that does not exist");
}

void released_twice() {
  const Ends ends(3);
  for (std::uint32_t microbatch = 0; microbatch < 3; ++microbatch) ends.send(microbatch);
  const Slot first = ends.receive().slot;
  (void)ends.receive();  // alive, as the third is: a slot too many would overwrite one of them
  ends.receiver->release(first, Stream{});
  ends.receiver->release(first, Stream{});
  expect(Fault::protocol, [&] { ends.send(3, 8, moment); }, "a slot was released twice");
}

void other_capacity() {
  Hub left(0);
  Hub right(1);
  join(left, right);
  left.start();
  right.start();
  const ShmSendLink sender(left, 1, 0, 4, policy());
  expect(Fault::protocol, [&] { const ShmReceiveLink receiver(right, 0, 0, 5, policy()); }, "another capacity");
}

// Tags and layouts, as the channel checks them.
void tags() {
  Hub left(0);
  Hub right(1);
  join(left, right);
  left.start();
  right.start();
  ShmSendLink send_link(left, 1, 0, 8, policy());
  ShmReceiveLink receive_link(right, 0, 0, 8, policy());
  ChannelSender sender(left, send_link, 1, channel, 8);
  ChannelReceiver receiver(right, receive_link, 0, channel, 8);
  const std::uint32_t layout = sender.announce("eight bytes", 8, 0, policy());
  const std::uint64_t data = 42;
  const auto send = [&](std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch, std::uint32_t id,
                        std::size_t bytes) {
    const Part part{&data, bytes, 0};
    sender.send(Envelope{0, stage, kind, microbatch, id, 0, 0, 0, 0}, std::span(&part, 1), Stream{}, policy());
  };
  send(2, forward, 7, layout, 8);
  const Error other =
      error_of([&] { (void)receiver.receive(MessageTag{2, ActionKind::F, 8, false}, Stream{}, policy()); },
               "another microbatch");
  check(other.fault() == Fault::mismatch, "another microbatch is a mismatch");
  const std::string text = other.what();
  check(text.find("2SEND_F7") != std::string::npos && text.find("2SEND_F8") != std::string::npos,
        "a mismatch names both sides: " + text);
  send(2, backward, 7, layout, 8);
  expect(
      Fault::mismatch, [&] { (void)receiver.receive(MessageTag{2, ActionKind::F, 7, false}, Stream{}, policy()); },
      "another kind");
  sender.send(Envelope{0, 2, forward, 7, layout, 1, 0, 0, 0}, {}, Stream{}, policy());
  const Error mode =
      error_of([&] { (void)receiver.receive(MessageTag{2, ActionKind::F, 7, false}, Stream{}, policy()); },
               "a message of an eval()");
  check(std::string(mode.what()).find("the other eval()") != std::string::npos, mode.what());
  send(2, 77, 7, layout, 8);
  const Error strange =
      error_of([&] { (void)receiver.receive(MessageTag{2, ActionKind::F, 7, false}, Stream{}, policy()); },
               "a kind that does not exist");
  check(std::string(strange.what()).find("2SEND_(kind 77)7") != std::string::npos, strange.what());
  send(2, forward, 7, layout, 4);
  expect(
      Fault::mismatch, [&] { (void)receiver.receive(MessageTag{2, ActionKind::F, 7, false}, Stream{}, policy()); },
      "too few bytes");
  send(2, forward, 7, layout + 1, 8);
  (void)sender.announce("a later layout", 8, 0, policy());
  (void)sender.announce("the latest layout", 8, 0, policy());
  WaitHistory history;
  const Arrival arrival = receive_link.receive(Stream{}, policy(), history);
  check(receiver.layout(arrival.envelope.layout, policy()).description == "a later layout", "another layout");
}

// A layout that was never announced, or was forgotten, is an error at once, without a wait.
void unknown_layouts() {
  Hub left(0);
  Hub right(1);
  join(left, right);
  left.start();
  right.start();
  LayoutAnnouncer announcer(left, 1, channel);
  LayoutBook book(right, 0, channel);
  const std::uint32_t first = announcer.announce("first", 8, 0, policy());
  const std::uint32_t second = announcer.announce("second", 8, first, policy());
  check(book.find(second, policy()).description == "second", "another layout");
  check_equal(book.received(), 2U, "layouts received");
  expect(Fault::protocol, [&] { (void)book.find(first, policy()); }, "a layout that was forgotten");
  (void)announcer.announce("third", 8, 0, policy());
  expect(Fault::protocol, [&] { (void)book.find(0, policy()); }, "layout 0");
  expect(
      Fault::usage, [&] { (void)announcer.announce(std::string(std::size_t{1} << 20, 'x'), 8, 0, policy()); },
      "a description over the limit");
  const std::uint32_t fourth = announcer.announce("fourth", 8, 0, policy());
  check(book.find(fourth, policy()).description == "fourth", "a refused announcement spoils the next");
}

// A wait of a known length: sleeps, polls when the end is expected, and sleeps again.
void foreseen_waits() {
  Doorbell bell;
  WaitPolicy waiting = policy(std::chrono::milliseconds(20));
  waiting.longest_spin = std::chrono::microseconds(200);
  WaitHistory history;
  const auto foresee = [&](std::chrono::milliseconds length) {
    for (int wait = 0; wait < 2; ++wait) history.note(length, waiting.longest_spin);
  };
  {
    const WithTimeouts timeouts;
    foresee(std::chrono::milliseconds(1));
    check(!await(bell, waiting, history, [] { return false; }, [] {}), "a wait ended without what it was for");
    foresee(std::chrono::hours(1));
    check(!await(bell, waiting, history, [] { return false; }, [] {}), "a timeout was slept through");
  }
  check_equal(bell.sleepers.load(), 0U, "sleepers that are left");
  foresee(std::chrono::hours(1));
  waiting.timeout = std::chrono::hours(1);
  std::atomic<bool> there{false};
  std::thread other([&] {
    there.store(true, std::memory_order_release);
    notify(bell);
  });
  check(await(bell, waiting, history, [&] { return there.load(std::memory_order_acquire); }, [] {}), "it never came");
  other.join();
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t rounds = argument(count, values, 1, 100);
  const std::size_t descriptors = open_descriptors();
  begin("waits");
  waits();
  begin("foreseen waits");
  foreseen_waits();
  begin("messages that outlive their link");
  outlived();
  begin("last messages");
  last_messages();
  begin("aborts", 45);
  aborts(rounds);
  begin("false credits");
  false_credits();
  begin("a slot released twice");
  released_twice();
  begin("another capacity");
  other_capacity();
  begin("tags");
  tags();
  begin("unknown layouts");
  unknown_layouts();
  check_equal(open_descriptors(), descriptors, "descriptors open at the end");
  std::printf("link_test: %llu aborts\n", static_cast<unsigned long long>(rounds));
}
