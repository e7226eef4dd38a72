// Sends messages through channels at random speeds and checks every byte twice. Arguments: seed, messages, spins.
//
// Two hubs in one process, a link each way, several channels on each. Both ends of a link follow the same
// seeded plan: which channel, which layout. The receiver keeps messages alive, up to the channel's slots, and
// releases them in random order; it checks their bytes at arrival and again before the release, so that a
// slot overwritten too early is found.
#include <algorithm>
#include <cinttypes>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "channel/channel.hpp"
#include "check.hpp"
#include "endless.hpp"
#include "link/shm/shm_link.hpp"
#include "sockets.hpp"

namespace pypipe::test {
namespace {

constexpr std::size_t largest = std::size_t{256} << 10;
constexpr std::size_t most_layouts = 16;
// How often slots are allocated at most: they grow in steps of an eighth of a power of two, from 4 KB to 256 KB.
constexpr std::uint64_t most_allocations = 6 * 8 + 1;
constexpr std::uint32_t stage = 7;
constexpr ActionKind kind = ActionKind::F;

// --- what is sent
// ----------------------------------------------------------------------------------------------------

struct Step {
  std::size_t channel = 0;  // among the link's
  std::uint32_t microbatch = 0;
  std::uint64_t layout = 0;  // counted from 1 for each channel
  std::vector<std::size_t> sizes;
  std::uint64_t forgotten = 0;
  bool fresh = false;
};

// The plan that both ends know in advance. Layouts are used for a while, used again, and forgotten.
class Plan {
 public:
  Plan(std::uint64_t seed, std::size_t channels, std::uint64_t messages)
      : random_(seed), messages_(messages), lanes_(channels) {}

  // Null after the last message.
  const Step* next() {
    if (sent_ == messages_) return nullptr;
    step_.channel = random_.below(lanes_.size());
    Lane& lane = lanes_[step_.channel];
    step_.microbatch = lane.messages++;
    step_.fresh = false;
    step_.forgotten = 0;
    const bool first_of_second_half = sent_ >= messages_ / 2 && !lane.saw_largest;
    if (lane.left == 0 || first_of_second_half) {
      change(lane, first_of_second_half);
    }
    lane.left -= 1;
    const Known& now = lane.known[lane.now];
    step_.layout = now.layout;
    step_.sizes = now.sizes;
    sent_ += 1;
    return &step_;
  }

 private:
  struct Known {
    std::uint64_t layout = 0;
    std::vector<std::size_t> sizes;
  };
  struct Lane {
    std::uint32_t messages = 0;
    std::uint64_t layouts = 0;
    std::uint64_t left = 0;  // messages until the layout changes
    std::size_t now = 0;
    bool saw_largest = false;
    std::deque<Known> known;
  };

  void change(Lane& lane, bool to_largest) {
    if (!to_largest && !lane.known.empty() && !random_.once_in(3)) {
      lane.now = random_.below(lane.known.size());
    } else {
      if (lane.known.size() == most_layouts) {
        step_.forgotten = lane.known.front().layout;
        lane.known.pop_front();
      }
      lane.known.push_back({++lane.layouts, to_largest ? std::vector{largest} : random_sizes()});
      lane.now = lane.known.size() - 1;
      step_.fresh = true;
      lane.saw_largest = lane.saw_largest || to_largest;
    }
    std::size_t bytes = 0;
    for (const std::size_t size : lane.known[lane.now].sizes) bytes += size;
    // Most messages are small: speed provokes races.
    lane.left = 1 + random_.below(bytes <= 2048 ? 200 : bytes <= 32768 ? 30 : 4);
  }

  // Up to three parts, of which some are empty. In the first half, sizes creep upwards.
  std::vector<std::size_t> random_sizes() {
    const std::size_t most = sent_ < messages_ / 4 ? 8 << 10 : sent_ < messages_ / 2 ? 100 << 10 : largest;
    std::vector<std::size_t> sizes(random_.below(4));
    for (std::size_t& size : sizes) {
      const std::uint64_t scale = random_.below(20);
      const std::size_t bound = scale < 14 ? 700 : scale < 18 ? 10'000 : largest / 3 - part_alignment;
      size = random_.once_in(8) ? 0 : random_.below(std::min(bound, most / 3));
    }
    return sizes;
  }

  Random random_;
  const std::uint64_t messages_;
  std::uint64_t sent_ = 0;
  std::vector<Lane> lanes_;
  Step step_;
};

std::uint64_t key_of(std::uint32_t channel, const Step& step, std::size_t part) {
  return Random((std::uint64_t{channel} << 48) ^ (step.layout << 24) ^ (std::uint64_t{part} << 44) ^
                (std::uint64_t{step.microbatch} << 3))
      .next();
}

// Eight bytes at a time, so that the check is cheap.
std::uint64_t word(std::uint64_t key, std::size_t i) { return key + i * 0x9e3779b97f4a7c15; }

void fill(std::byte* at, std::size_t bytes, std::uint64_t key) {
  const std::size_t words = bytes / 8;
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint64_t value = word(key, i);
    std::memcpy(at + 8 * i, &value, 8);
  }
  const std::uint64_t last = word(key, words);
  std::memcpy(at + 8 * words, &last, bytes % 8);
}

bool matches(const std::byte* at, std::size_t bytes, std::uint64_t key) {
  const std::size_t words = bytes / 8;
  std::uint64_t differences = 0;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t value = 0;
    std::memcpy(&value, at + 8 * i, 8);
    differences |= value ^ word(key, i);
  }
  const std::uint64_t last = word(key, words);
  return differences == 0 && std::memcmp(at + 8 * words, &last, bytes % 8) == 0;
}

std::string describe(const Step& step) {
  std::string text = "layout " + std::to_string(step.layout) + ":";
  for (const std::size_t size : step.sizes) text += " " + std::to_string(size);
  return text;
}

// Pauses now and then, so that sometimes the sender waits for the receiver, and sometimes the receiver for the sender.
void dawdle(Random& random) {
  const std::uint64_t choice = random.below(4000);
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
  if (choice < 40) std::this_thread::yield();
}

// --- the two ends
// ----------------------------------------------------------------------------------------------------

struct Route {
  std::uint32_t number = 0;
  std::vector<std::uint32_t> slots;  // of each channel
  std::uint64_t seed = 0;
  std::uint64_t messages = 0;
  std::uint32_t spins = 0;

  [[nodiscard]] std::uint32_t channel(std::size_t index) const {
    return number * 100 + static_cast<std::uint32_t>(index);
  }
  [[nodiscard]] std::uint32_t capacity() const {
    std::uint32_t all = 0;
    for (const std::uint32_t count : slots) all += count;
    return all;
  }
};

void produce(Hub& hub, int peer, const Route& route, std::vector<ChannelCounters>& counters) {
  const WaitPolicy waiting = policy(std::chrono::seconds(60), route.spins);
  ShmSendLink link(hub, peer, route.number, route.capacity(), waiting);
  struct Lane {
    std::unique_ptr<ChannelSender> channel;
    std::map<std::uint64_t, std::uint32_t> ids;
    std::uint64_t allocations_at_largest = 0;
  };
  std::vector<Lane> lanes(route.slots.size());
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i].channel = std::make_unique<ChannelSender>(hub, link, peer, route.channel(i), route.slots[i]);
  }
  Plan plan(route.seed, route.slots.size(), route.messages);
  Random random(route.seed + 1);
  std::vector<std::byte> scratch(largest + 64);
  while (const Step* step = plan.next()) {
    dawdle(random);
    Lane& lane = lanes[step->channel];
    const std::vector<std::size_t> offsets = pack(step->sizes);
    if (step->fresh) {
      const std::uint32_t forgotten = step->forgotten == 0 ? 0 : lane.ids.at(step->forgotten);
      lane.ids.erase(step->forgotten);
      lane.ids[step->layout] = lane.channel->announce(describe(*step), offsets.back(), forgotten, waiting);
      if (step->sizes == std::vector{largest} && lane.allocations_at_largest == 0) {
        lane.allocations_at_largest = lane.channel->counters().allocations;
      }
    }
    std::vector<Part> parts;
    std::size_t at = 0;
    for (std::size_t i = 0; i < step->sizes.size(); ++i) {
      const std::size_t size = step->sizes[i];
      fill(scratch.data() + at, size, key_of(route.channel(step->channel), *step, i));
      // An empty tensor has no address.
      parts.push_back(Part{size == 0 ? nullptr : scratch.data() + at, size, offsets[i]});
      at += size;
    }
    Envelope envelope;
    envelope.stage = stage;
    envelope.kind = static_cast<std::uint32_t>(kind);
    envelope.microbatch = step->microbatch;
    envelope.layout = lane.ids.at(step->layout);
    envelope.rows = step->layout;
    lane.channel->send(envelope, parts, Stream{}, waiting);
    // On a CPU the caller may reuse the parts.
    std::fill_n(scratch.data(), std::min<std::size_t>(at, 64), std::byte{0xee});
  }
  for (const Lane& lane : lanes) {
    const ChannelCounters& counted = lane.channel->counters();
    check(counted.allocations <= most_allocations, "slots grew " + std::to_string(counted.allocations) + " times");
    check_equal(counted.allocations, lane.allocations_at_largest, "allocations after the largest layout");
    counters.push_back(counted);
  }
}

void consume(Hub& hub, int peer, const Route& route, std::vector<ChannelCounters>& counters) {
  const WaitPolicy waiting = policy(std::chrono::seconds(60), route.spins);
  ShmReceiveLink link(hub, peer, route.number, route.capacity(), waiting);
  struct Held {
    Step step;
    Slot slot;
  };
  struct Lane {
    std::unique_ptr<ChannelReceiver> channel;
    std::vector<Held> held;
    std::size_t most_held = 0;
  };
  std::vector<Lane> lanes(route.slots.size());
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i].channel = std::make_unique<ChannelReceiver>(hub, link, peer, route.channel(i), route.slots[i]);
  }
  Plan plan(route.seed, route.slots.size(), route.messages);
  Random random(route.seed + 2);
  const auto check_bytes = [&](const Step& step, const Slot& slot, const char* when) {
    const std::vector<std::size_t> offsets = pack(step.sizes);
    for (std::size_t i = 0; i < step.sizes.size(); ++i) {
      if (matches(slot.data + offsets[i], step.sizes[i], key_of(route.channel(step.channel), step, i))) continue;
      fail("wrong bytes " + std::string(when) + ": channel " + std::to_string(route.channel(step.channel)) +
           ", microbatch " + std::to_string(step.microbatch) + ", part " + std::to_string(i) + " of " + describe(step) +
           ", slot " + std::to_string(slot.index) + " of generation " + std::to_string(slot.generation));
    }
  };
  const auto release = [&](Lane& lane) {
    const std::size_t which = random.below(lane.held.size());
    check_bytes(lane.held[which].step, lane.held[which].slot, "before the release");
    lane.channel->release(lane.held[which].slot, Stream{});
    lane.held[which] = std::move(lane.held.back());
    lane.held.pop_back();
  };
  while (const Step* step = plan.next()) {
    dawdle(random);
    Lane& lane = lanes[step->channel];
    if (lane.held.size() == route.slots[step->channel]) release(lane);
    while (!lane.held.empty() && random.once_in(4)) release(lane);
    lane.channel->post(Stream{}, waiting);
    Arrival arrival = lane.channel->receive(MessageTag{stage, kind, step->microbatch, false}, Stream{}, waiting);
    check_equal(arrival.envelope.rows, step->layout, "the layout of a message");
    check_equal(arrival.envelope.bytes, pack(step->sizes).back(), "the bytes of a message");
    const LayoutBook::Layout& layout = lane.channel->layout(arrival.envelope.layout, waiting);
    check(layout.description == describe(*step), "another description: " + layout.description);
    check(layout.bytes <= arrival.slot.bytes, "a slot too small for its message");
    check_bytes(*step, arrival.slot, "at arrival");
    lane.held.push_back({*step, std::move(arrival.slot)});
    lane.most_held = std::max(lane.most_held, lane.held.size());
    check_equal(lane.channel->counters().alive, lane.held.size(), "messages alive");
  }
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    while (!lanes[i].held.empty()) release(lanes[i]);
    const ChannelCounters& counted = lanes[i].channel->counters();
    check_equal(counted.most_alive, lanes[i].most_held, "most messages alive");
    check(counted.most_alive <= counted.slots, "more messages alive than slots");
    check_equal(counted.alive, 0U, "messages alive at the end");
    counters.push_back(counted);
  }
}

void run(std::uint64_t seed, std::uint64_t messages, std::uint32_t spins) {
  Hub left(0);
  Hub right(1);
  join(left, right);
  left.start();
  right.start();
  // P=2: the next rank is the previous one too, so links carry several channels each way.
  const Route forward{1, {1, 3, 8}, seed * 10, messages, spins};
  const Route backward{2, {2, 5}, seed * 10 + 5, messages, spins};
  std::array<std::vector<ChannelCounters>, 2> sent;
  std::array<std::vector<ChannelCounters>, 2> received;
  std::vector<std::thread> threads;
  threads.emplace_back([&] { produce(left, 1, forward, sent[0]); });
  threads.emplace_back([&] { consume(right, 0, forward, received[0]); });
  threads.emplace_back([&] { produce(right, 0, backward, sent[1]); });
  threads.emplace_back([&] { consume(left, 1, backward, received[1]); });
  for (std::thread& thread : threads) thread.join();
  std::uint64_t bytes = 0;
  std::uint64_t layouts = 0;
  std::uint64_t allocations = 0;
  for (std::size_t way = 0; way < 2; ++way) {
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < sent[way].size(); ++i) {
      const ChannelCounters& out = sent[way][i];
      const ChannelCounters& in = received[way][i];
      check_equal(in.messages, out.messages, "messages received and sent");
      check_equal(in.bytes, out.bytes, "bytes received and sent");
      check_equal(in.layouts, out.layouts, "layouts received and sent");
      // The receiver counts the slots that it has seen; a message follows every layout that is announced.
      check_equal(in.allocations, out.allocations, "allocations at both ends");
      check_equal(in.slot_bytes, out.slot_bytes, "the size of slots at both ends");
      all += in.messages;
      bytes += in.bytes;
      layouts += in.layouts;
      allocations += in.allocations;
    }
    check_equal(all, messages, "all messages");
  }
  left.close();
  right.close();
  std::printf("channel_stress: seed %" PRIu64 ", spins %" PRIu32 ": %" PRIu64 " messages, %" PRIu64 " MB, %" PRIu64
              " layouts, %" PRIu64 " allocations\n",
              seed, spins, 2 * messages, bytes >> 20, layouts, allocations);
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t seed = argument(count, values, 1, 1);
  const std::uint64_t messages = argument(count, values, 2, 100'000);
  check(messages >= 1000, "fewer messages do not reach every channel and size");
  const auto spins = static_cast<std::uint32_t>(argument(count, values, 3, 0));
  begin("channels", 120);
  const std::size_t descriptors = open_descriptors();
  run(seed, messages, spins);
  check_equal(open_descriptors(), descriptors, "descriptors open at the end");
}
