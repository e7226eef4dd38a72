#include "link/shm/shm_link.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "link/slots.hpp"

namespace pypipe {

// The start of a link's segment; messages[capacity] and credits[capacity] follow.
struct ShmRings {
  alignas(64) std::atomic<std::uint64_t> published{0};  // written by the sender
  alignas(64) std::atomic<std::uint64_t> returned{0};   // written by the receiver
  Doorbell receiver;                                    // the receiver sleeps here
  Doorbell sender;                                      // the sender sleeps here
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

namespace {

struct Message {
  Envelope envelope;
  std::uint32_t generation;
  std::uint32_t slot;
};

struct Credit {
  std::uint32_t channel;
  std::uint32_t generation;
  std::uint32_t slot;
};

// The payload of a memory frame that announces slots.
struct SlotsFrame {
  std::uint64_t slots;
  std::uint64_t bytes;
};

constexpr std::size_t slot_alignment = 64;

Message* messages(ShmRings* rings) {
  return reinterpret_cast<Message*>(reinterpret_cast<std::byte*>(rings) + sizeof(ShmRings));
}

Credit* credits(ShmRings* rings, std::uint32_t capacity) {
  return reinterpret_cast<Credit*>(messages(rings) + capacity);
}

std::size_t rings_bytes(std::uint32_t capacity) {
  return sizeof(ShmRings) + std::size_t{capacity} * (sizeof(Message) + sizeof(Credit));
}

std::string about(std::uint32_t channel, int peer) {
  return "channel " + std::to_string(channel) + " with rank " + std::to_string(peer);
}

}  // namespace

ShmSendLink::ShmSendLink(Hub& hub, int peer, std::uint32_t link, std::uint32_t capacity, const WaitPolicy& policy)
    : hub_(hub),
      peer_(peer),
      capacity_(capacity),
      memory_(Segment::create(rings_bytes(capacity))),
      rings_(new (memory_->data()) ShmRings) {
  hub_.send(peer_, FrameType::memory, link | link_frames, 0, {}, policy, memory_->descriptor());
  hub_.watch(rings_->sender);
}

ShmSendLink::~ShmSendLink() { hub_.unwatch(rings_->sender); }

void ShmSendLink::reserve(std::uint32_t channel, std::uint32_t slots, std::size_t bytes, const WaitPolicy& policy) {
  const std::size_t padded = (bytes + slot_alignment - 1) / slot_alignment * slot_alignment;
  Lane& lane = lanes_[channel];
  lane.memory = Segment::create(std::max(padded * slots, slot_alignment));
  // Messages of older generations stay in flight until the receiver returns them; until then they count.
  lane.old_in_flight += lane.slots - static_cast<std::uint32_t>(lane.free.size());
  lane.generation += 1;
  lane.slots = slots;
  lane.bytes = padded;
  lane.out.assign(slots, false);
  lane.free.clear();
  for (std::uint32_t slot = slots; slot > 0; --slot) lane.free.push_back(slot - 1);
  const SlotsFrame frame{slots, padded};
  hub_.send(peer_, FrameType::memory, channel, lane.generation,
            std::string_view(reinterpret_cast<const char*>(&frame), sizeof(frame)), policy, lane.memory->descriptor());
}

void ShmSendLink::collect_credits() {
  const std::uint64_t returned = rings_->returned.load(std::memory_order_acquire);
  if (returned - collected_ > capacity_) throw Error(Fault::protocol, "the receiver returned slots it did not have");
  for (; collected_ != returned; ++collected_) {
    const Credit credit = credits(rings_, capacity_)[collected_ % capacity_];
    const auto found = lanes_.find(credit.channel);
    if (found == lanes_.end()) {
      throw Error(Fault::protocol, "the receiver returned a slot of an unknown " + about(credit.channel, peer_));
    }
    Lane& lane = found->second;
    const bool current = credit.generation == lane.generation;
    if (current ? credit.slot >= lane.slots || !lane.out[credit.slot] : lane.old_in_flight == 0) {
      throw Error(Fault::protocol,
                  "the receiver returned a slot that it did not have, of " + about(credit.channel, peer_));
    }
    if (current) {
      lane.out[credit.slot] = false;
      lane.free.push_back(credit.slot);
    } else {
      lane.old_in_flight -= 1;
    }
  }
}

bool ShmSendLink::has_room(std::uint32_t channel) {
  const auto found = lanes_.find(channel);
  return found != lanes_.end() && has_room(found->second);
}

bool ShmSendLink::has_room(const Lane& lane) {
  collect_credits();
  return lane.old_in_flight < lane.free.size();  // so that all generations together never exceed `slots`
}

std::uint64_t ShmSendLink::send(const Envelope& envelope, std::span<const Part> parts, Stream /*stream*/,
                                const WaitPolicy& policy, WaitHistory& history) {
  const auto found = lanes_.find(envelope.channel);
  if (found == lanes_.end() || envelope.bytes > found->second.bytes) {
    throw Error(Fault::usage, "no slots were reserved for " + std::to_string(envelope.bytes) + " bytes on " +
                                  about(envelope.channel, peer_));
  }
  Lane& lane = found->second;
  const auto ready = [&] { return has_room(lane); };
  if (!await(rings_->sender, policy, history, ready, [this] { hub_.check(peer_); })) {
    throw Error(Fault::timeout, "no slot came free on " + about(envelope.channel, peer_));
  }
  const std::uint32_t slot = lane.free.back();
  std::byte* const data = lane.memory->data() + std::size_t{slot} * lane.bytes;
  for (const Part& part : parts) {
    if (part.bytes > 0) std::memcpy(data + part.offset, part.data, part.bytes);  // an empty tensor has no address
  }
  messages(rings_)[published_ % capacity_] = Message{envelope, lane.generation, slot};
  lane.free.pop_back();
  lane.out[slot] = true;
  rings_->published.store(++published_, std::memory_order_release);
  notify(rings_->receiver);
  return published_;
}

ShmReceiveLink::ShmReceiveLink(Hub& hub, int peer, std::uint32_t link, std::uint32_t capacity, const WaitPolicy& policy)
    : hub_(hub), peer_(peer), capacity_(capacity) {
  Frame frame = hub_.take(peer_, FrameType::memory, link | link_frames, policy);
  memory_ = Segment::attach(std::move(frame.descriptor), rings_bytes(capacity));
  rings_ = std::launder(reinterpret_cast<ShmRings*>(memory_->data()));
  hub_.watch(rings_->receiver);
}

ShmReceiveLink::~ShmReceiveLink() { hub_.unwatch(rings_->receiver); }

void ShmReceiveLink::post(std::uint32_t /*channel*/, Stream /*stream*/, const WaitPolicy& /*policy*/) {
  // Nothing to do: release() has given the slot's credit to the sender.
}

ShmReceiveLink::Lane& ShmReceiveLink::lane(std::uint32_t channel, std::uint32_t generation, const WaitPolicy& policy) {
  Lane& lane = lanes_[channel];
  while (lane.generation != generation) {
    Frame frame = hub_.take(peer_, FrameType::memory, channel, policy);
    SlotsFrame slots{};
    if (frame.payload.size() != sizeof(slots)) throw Error(Fault::protocol, "a memory frame of the wrong length");
    std::memcpy(&slots, frame.payload.data(), sizeof(slots));
    constexpr std::uint64_t most_bytes = std::uint64_t{1} << 46;
    if (frame.value != lane.generation + 1 || slots.slots > capacity_ || slots.bytes > most_bytes) {
      throw Error(Fault::protocol, "impossible slots were announced for " + about(channel, peer_));
    }
    lane.memory = Segment::attach(std::move(frame.descriptor), std::max(slots.slots * slots.bytes, slot_alignment));
    lane.generation = static_cast<std::uint32_t>(frame.value);
    lane.slots = static_cast<std::uint32_t>(slots.slots);
    lane.bytes = slots.bytes;
  }
  return lane;
}

Arrival ShmReceiveLink::receive(Stream /*stream*/, const WaitPolicy& policy, WaitHistory& history) {
  const auto ready = [this] { return rings_->published.load(std::memory_order_acquire) != consumed_; };
  if (!await(rings_->receiver, policy, history, ready, [this] { hub_.check(peer_); })) {
    throw Error(Fault::timeout, "no message came from rank " + std::to_string(peer_));
  }
  const Message message = messages(rings_)[consumed_ % capacity_];
  const Envelope& envelope = message.envelope;
  const Lane& from = lane(envelope.channel, message.generation, policy);
  if (message.slot >= from.slots || envelope.bytes > from.bytes) {
    throw Error(Fault::protocol, "a message outside its slots on " + about(envelope.channel, peer_));
  }
  consumed_ += 1;
  return Arrival{envelope, Slot{envelope.channel, message.generation, message.slot,
                                from.memory->data() + std::size_t{message.slot} * from.bytes, from.bytes, from.memory}};
}

void ShmReceiveLink::release(const Slot& slot, Stream /*stream*/) {
  credits(rings_, capacity_)[returned_ % capacity_] = Credit{slot.channel, slot.generation, slot.index};
  rings_->returned.store(++returned_, std::memory_order_release);
  notify(rings_->sender);
}

}  // namespace pypipe
