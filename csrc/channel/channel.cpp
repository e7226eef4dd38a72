#include "channel/channel.hpp"

#include <algorithm>
#include <cstring>

#include "base/action.hpp"
#include "base/error.hpp"
#include "link/slots.hpp"

namespace pypipe {
namespace {

struct LayoutHeader {
  std::uint64_t bytes;
  std::uint32_t forgotten;
  std::uint32_t reserved;
};

// In the notation of programs: 2SEND_F0.
std::string text_of(std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch, std::uint32_t run) {
  return std::to_string(stage) + "SEND_" + kind_name(kind) + std::to_string(microbatch) +
         (run % 2 == 1 ? " of an eval()" : "");
}

std::string text_of(const MessageTag& tag) {
  return text_of(tag.stage, static_cast<std::uint32_t>(tag.kind), tag.microbatch, tag.run);
}

}  // namespace

std::vector<std::size_t> pack(std::span<const std::size_t> sizes) {
  std::vector<std::size_t> offsets;
  offsets.reserve(sizes.size() + 1);
  std::size_t at = 0;
  std::size_t end = 0;
  for (const std::size_t size : sizes) {
    offsets.push_back(at);
    end = at + size;
    at = (end + part_alignment - 1) / part_alignment * part_alignment;
  }
  offsets.push_back(end);
  return offsets;
}

std::uint32_t LayoutAnnouncer::announce(std::string_view description, std::size_t bytes, std::uint32_t forgotten,
                                        const WaitPolicy& policy) {
  const LayoutHeader header{bytes, forgotten, 0};
  std::string payload(reinterpret_cast<const char*>(&header), sizeof(header));
  payload += description;
  if (payload.size() > layout_limit) {
    throw Error(Fault::usage, "the layout of this stage's output takes " + std::to_string(payload.size()) +
                                  " bytes to describe; at most " + std::to_string(layout_limit) +
                                  " are allowed: send long lists of numbers and long strings as tensors");
  }
  hub_.send(peer_, FrameType::layout, channel_, ++last_, payload, policy);
  return last_;
}

const LayoutBook::Layout& LayoutBook::find(std::uint32_t id, const WaitPolicy& policy) {
  for (;;) {
    const auto found = layouts_.find(id);
    if (found != layouts_.end()) return found->second;
    if (id <= newest_) {  // ids only grow: it will not be announced again
      throw Error(Fault::protocol, "rank " + std::to_string(peer_) + " sent a message of layout " + std::to_string(id) +
                                       ", which it has forgotten");
    }
    const Frame frame = hub_.take(peer_, FrameType::layout, channel_, policy);
    LayoutHeader header{};
    if (frame.payload.size() < sizeof(header)) throw Error(Fault::protocol, "a layout frame that is too short");
    std::memcpy(&header, frame.payload.data(), sizeof(header));
    if (frame.value <= newest_ || frame.value > id) {
      throw Error(Fault::protocol, "rank " + std::to_string(peer_) + " sent a message of layout " + std::to_string(id) +
                                       ", which it never announced");
    }
    newest_ = frame.value;
    if (header.forgotten != 0) layouts_.erase(header.forgotten);
    layouts_[static_cast<std::uint32_t>(frame.value)] = {header.bytes, frame.payload.substr(sizeof(header))};
    received_ += 1;
  }
}

ChannelSender::ChannelSender(Hub& hub, SendLink& link, int peer, std::uint32_t channel, std::uint32_t slots)
    : link_(link), channel_(channel), announcer_(hub, peer, channel) {
  counters_.slots = slots;
}

std::uint32_t ChannelSender::announce(std::string_view description, std::size_t bytes, std::uint32_t forgotten,
                                      const WaitPolicy& policy) {
  if (counters_.allocations == 0 || bytes > counters_.slot_bytes) {
    const std::size_t size = slot_size(bytes);
    link_.reserve(channel_, static_cast<std::uint32_t>(counters_.slots), size, policy);
    counters_.slot_bytes = size;
    counters_.allocations += 1;
  }
  const std::uint32_t id = announcer_.announce(description, bytes, forgotten, policy);
  counters_.layouts += 1;
  return id;
}

std::uint64_t ChannelSender::send(Envelope envelope, std::span<const Part> parts, Stream stream,
                                  const WaitPolicy& policy) {
  envelope.channel = channel_;
  envelope.bytes = 0;
  for (const Part& part : parts) {
    envelope.bytes = std::max<std::uint64_t>(envelope.bytes, part.offset + part.bytes);
  }
  const std::uint64_t number = link_.send(envelope, parts, stream, policy, histories_.of(envelope.microbatch));
  counters_.messages += 1;
  counters_.bytes += envelope.bytes;
  return number;
}

void check_tag(const Envelope& got, std::uint32_t channel, const MessageTag& expected, int peer) {
  if (got.channel == channel && got.stage == expected.stage && got.kind == static_cast<std::uint32_t>(expected.kind) &&
      got.microbatch == expected.microbatch && got.run == expected.run) {
    return;
  }
  throw Error(Fault::mismatch, "rank " + std::to_string(peer) + " sent " +
                                   text_of(got.stage, got.kind, got.microbatch, got.run) + " where " +
                                   text_of(expected) + " was expected: " +
                                   (got.run == expected.run ? "the two ranks run different programs"
                                                            : run_difference(got.run, expected.run, peer)));
}

ChannelReceiver::ChannelReceiver(Hub& hub, ReceiveLink& link, int peer, std::uint32_t channel, std::uint32_t slots)
    : link_(link), peer_(peer), channel_(channel), layouts_(hub, peer, channel) {
  counters_.slots = slots;
}

Arrival ChannelReceiver::receive(const MessageTag& expected, Stream stream, const WaitPolicy& policy) {
  Arrival arrival = link_.receive(stream, policy, histories_.of(expected.microbatch));
  check_tag(arrival.envelope, channel_, expected, peer_);
  const LayoutBook::Layout& layout = layouts_.find(arrival.envelope.layout, policy);
  if (layout.bytes != arrival.envelope.bytes) {
    throw Error(Fault::mismatch, text_of(expected) + " of rank " + std::to_string(peer_) + " has " +
                                     std::to_string(arrival.envelope.bytes) + " bytes, its layout " +
                                     std::to_string(layout.bytes));
  }
  if (arrival.slot.generation != generation_) {
    generation_ = arrival.slot.generation;
    counters_.allocations += 1;
  }
  counters_.slot_bytes = arrival.slot.bytes;
  counters_.layouts = layouts_.received();
  counters_.messages += 1;
  counters_.bytes += arrival.envelope.bytes;
  counters_.alive += 1;
  counters_.most_alive = std::max(counters_.most_alive, counters_.alive);
  return arrival;
}

void ChannelReceiver::release(const Slot& slot, Stream stream) {
  counters_.alive -= 1;
  link_.release(slot, stream);
}

}  // namespace pypipe
