#include "link/nccl/nccl_link.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "link/slots.hpp"

namespace pypipe {
namespace {

cuda::Pointer device_pointer(const void* data) { return reinterpret_cast<cuda::Pointer>(data); }

cuda::StreamHandle handle(Stream stream) { return static_cast<cuda::StreamHandle>(stream.handle); }

// The operation of a message that is held back; no operation has so high a number.
constexpr std::uint64_t not_started = std::numeric_limits<std::uint64_t>::max();

}  // namespace

NcclSendLink::NcclSendLink(Hub& hub, int peer, std::uint32_t link, std::shared_ptr<NcclEdge> edge, Allocate allocate,
                           std::shared_ptr<NcclGroup> group)
    : hub_(hub),
      peer_(peer),
      link_(link | link_frames),
      edge_(std::move(edge)),
      allocate_(std::move(allocate)),
      group_(std::move(group)),
      made_(edge_->gpu()),
      left_(edge_->gpu()) {}

NcclSendLink::~NcclSendLink() = default;

void NcclSendLink::reserve(std::uint32_t channel, std::uint32_t slots, std::size_t /*bytes*/,
                           const WaitPolicy& /*policy*/) {
  slots_[channel] = slots;  // the receiver owns them, and learns their size from the envelopes
}

std::byte* NcclSendLink::staging(std::size_t bytes) {
  if (packed_ == stagings_.size()) stagings_.emplace_back();
  Staging& area = stagings_[packed_];
  if (group_) packed_ += 1;
  if (bytes > area.bytes) {
    // The link's stream may still read the smaller one.
    if (area.memory) outgrown_.emplace_back(messages_ - 1, std::move(area.memory));
    area.bytes = slot_size(bytes);
    area.memory = allocate_(area.bytes);
  }
  return static_cast<std::byte*>(area.memory.get());
}

NcclSendLink::Outgoing NcclSendLink::prepare(const Envelope& envelope, std::span<const Part> parts, Stream stream) {
  const bool packed = parts.size() > 1;
  const std::byte* const area = packed ? staging(envelope.bytes) : nullptr;
  // After the allocation: fresh memory may still be in use by earlier work of the compute stream.
  made_.record(handle(stream));
  made_.hold_up(edge_->stream().handle());
  if (!packed) return {parts.front().data, envelope.bytes};
  const cuda::Api& cuda = *edge_->cuda();
  for (const Part& part : parts) {
    if (part.bytes == 0) continue;
    cuda.check(cuda.copy_async(device_pointer(area + part.offset), device_pointer(part.data), part.bytes,
                               edge_->stream().handle()));
  }
  return {area, envelope.bytes};
}

void NcclSendLink::enqueue(const Outgoing& message, nccl::CommunicatorHandle communicator,
                           cuda::StreamHandle on) const {
  const nccl::Api& nccl = edge_->nccl();
  nccl.check(nccl.send(message.data, message.bytes, nccl::uint8, edge_->peer(), communicator, on));
}

std::uint64_t NcclSendLink::send(const Envelope& envelope, std::span<const Part> parts, Stream stream,
                                 const WaitPolicy& policy, WaitHistory& /*history*/) {
  hub_.send(peer_, FrameType::envelope, link_, 0,
            std::string_view(reinterpret_cast<const char*>(&envelope), sizeof(envelope)), policy);
  messages_ += 1;
  if (std::ranges::all_of(parts, [](const Part& part) { return part.bytes == 0; })) {
    operations_.push_back(0);
    return messages_;
  }
  const cuda::Current current(edge_->gpu());
  const Outgoing message = prepare(envelope, parts, stream);
  std::uint64_t& operation = operations_.emplace_back(not_started);
  NcclTransfer transfer{edge_.get(), [](const WaitPolicy&) { return true; },
                        [this, message](nccl::CommunicatorHandle communicator, cuda::StreamHandle on) {
                          enqueue(message, communicator, on);
                        },
                        [this, &operation](std::uint64_t number) {
                          operation = number;
                          packed_ = 0;
                        }};
  if (group_) {
    group_->add(std::move(transfer));
  } else {
    issue(transfer, policy);
  }
  limit(envelope.channel, stream);
  return messages_;
}

void NcclSendLink::limit(std::uint32_t channel, Stream stream) {
  std::deque<std::uint64_t>& messages = unlimited_[channel];
  messages.push_back(messages_);
  if (messages.size() <= slots_[channel]) return;
  const std::uint64_t message = messages.front();
  messages.pop_front();
  if (message <= awaited_) return;
  const std::uint64_t gone = messages_ - operations_.size();
  if (message > gone) {
    const std::uint64_t operation = operations_[message - gone - 1];
    if (operation == not_started) return;  // its group comes later
    edge_->hold_up(handle(stream), operation);
  }
  awaited_ = message;
}

std::uint64_t NcclSendLink::sent() {
  const std::uint64_t ended = edge_->ended();
  while (!operations_.empty() && operations_.front() <= ended) operations_.pop_front();
  const std::uint64_t sent = std::max(messages_ - operations_.size(), awaited_);
  while (!outgrown_.empty() && outgrown_.front().first <= sent) outgrown_.pop_front();
  return sent;
}

void NcclSendLink::finish(Stream stream) {
  if (awaited_ == messages_) return;
  if (!operations_.empty() && operations_.back() == not_started) {
    throw Error(Fault::usage, "messages are waited for before their group was issued");
  }
  awaited_ = messages_;
  const cuda::Current current(edge_->gpu());
  left_.record(edge_->stream().handle());
  left_.hold_up(handle(stream));
}

NcclReceiveLink::NcclReceiveLink(Hub& hub, int peer, std::uint32_t link, std::shared_ptr<NcclEdge> edge,
                                 Allocate allocate, const std::map<std::uint32_t, std::uint32_t>& slots,
                                 std::shared_ptr<NcclGroup> group)
    : hub_(hub),
      peer_(peer),
      link_(link | link_frames),
      edge_(std::move(edge)),
      allocate_(std::move(allocate)),
      group_(std::move(group)),
      events_(edge_->shared_gpu()) {
  for (const auto& [channel, count] : slots) lanes_[channel].slots = count;
}

NcclReceiveLink::~NcclReceiveLink() = default;

void NcclReceiveLink::await(cuda::Event event, cuda::StreamHandle stream) {
  event.hold_up(stream);
  events_.give_back(std::move(event));  // the stream waits for what is recorded now, whatever is recorded later
}

void NcclReceiveLink::begin(std::uint32_t channel, std::uint32_t run) {
  const auto [at, is_first] = promises_.try_emplace({channel, run});
  at->second.kept = !is_first;
  at->second.used = 0;
  current_[channel] = &at->second;
}

void NcclReceiveLink::check(const Envelope& got) {
  const Envelope promised = unseen_.front();
  unseen_.pop_front();
  if (std::memcmp(&got, &promised, sizeof(got)) == 0) return;
  if (got.run != promised.run) throw Error(Fault::mismatch, run_difference(got.run, promised.run, peer_));
  throw Error(Fault::mismatch, "rank " + std::to_string(peer_) + " sent " + std::to_string(got.bytes) +
                                   " bytes of layout " + std::to_string(got.layout) + " where " +
                                   std::to_string(promised.bytes) + " of layout " + std::to_string(promised.layout) +
                                   " were promised by its first run");
}

Envelope NcclReceiveLink::next(std::uint32_t channel, const WaitPolicy& policy) {
  while (!unseen_.empty()) {
    const auto frame = hub_.try_take(peer_, FrameType::envelope, link_);
    if (!frame) break;
    check(envelope_of(*frame));
  }
  const auto found = current_.find(channel);
  Promise* const promise = found == current_.end() ? nullptr : found->second;
  if (promise != nullptr && promise->kept) {
    if (promise->used == promise->envelopes.size()) {
      throw Error(Fault::usage, "a run has more messages than the first one: the program was not verified");
    }
    return unseen_.emplace_back(promise->envelopes[promise->used++]);
  }
  while (!unseen_.empty()) check(envelope_of(hub_.take(peer_, FrameType::envelope, link_, policy)));
  const Envelope envelope = envelope_of(hub_.take(peer_, FrameType::envelope, link_, policy));
  if (promise != nullptr) promise->envelopes.push_back(envelope);
  return envelope;
}

NcclTransfer NcclReceiveLink::transfer(std::uint32_t channel, Stream stream) {
  const auto message = std::make_shared<Started*>();
  return {edge_.get(),
          [this, message, channel, stream](const WaitPolicy& policy) {
            const Envelope envelope = next(channel, policy);
            const cuda::Current current(edge_->gpu());
            *message = &place(envelope, stream);
            return envelope.bytes > 0;
          },
          [this, message](nccl::CommunicatorHandle communicator, cuda::StreamHandle on) {
            enqueue((*message)->arrival, communicator, on);
          },
          [this, message](std::uint64_t) { note_arrival(**message); }};
}

void NcclReceiveLink::post(std::uint32_t channel, Stream stream, const WaitPolicy& policy) {
  if (group_) return group_->add(transfer(channel, stream));
  const cuda::Current current(edge_->gpu());
  issue(transfer(channel, stream), policy);
}

void NcclReceiveLink::grow(Lane& lane, std::size_t bytes, Stream stream) {
  lane.bytes = slot_size(bytes);
  lane.generation += 1;
  lane.memory = allocate_(lane.bytes * lane.slots);
  // Fresh memory may still be in use by earlier work of the compute stream.
  cuda::Event given = events_.take();
  given.record(handle(stream));
  await(std::move(given), edge_->stream().handle());
  lane.free.clear();
  for (std::uint32_t index = lane.slots; index > 0; --index) lane.free.push_back({index - 1, std::nullopt});
}

NcclReceiveLink::Started& NcclReceiveLink::place(const Envelope& envelope, Stream stream) {
  const auto what = [&] {
    return "a message of channel " + std::to_string(envelope.channel) + " from rank " + std::to_string(peer_);
  };
  const auto found = lanes_.find(envelope.channel);
  if (found == lanes_.end()) throw Error(Fault::protocol, what() + ", which is not on this link");
  Lane& lane = found->second;
  if (lane.alive >= lane.slots) throw Error(Fault::usage, what() + " finds no free slot: the program was not verified");
  if (lane.generation == 0 || envelope.bytes > lane.bytes) grow(lane, envelope.bytes, stream);
  Place place = std::move(lane.free.back());
  lane.free.pop_back();
  lane.alive += 1;
  auto* const data = static_cast<std::byte*>(lane.memory.get()) + std::size_t{place.index} * lane.bytes;
  if (envelope.bytes > 0 && place.read) await(*std::move(place.read), edge_->stream().handle());
  const Slot slot{envelope.channel, lane.generation, place.index, data, lane.bytes, lane.memory};
  return started_.emplace_back(Started{Arrival{envelope, slot}, std::nullopt});
}

void NcclReceiveLink::enqueue(const Arrival& message, nccl::CommunicatorHandle communicator,
                              cuda::StreamHandle on) const {
  const nccl::Api& nccl = edge_->nccl();
  nccl.check(nccl.receive(message.slot.data, message.envelope.bytes, nccl::uint8, edge_->peer(), communicator, on));
}

void NcclReceiveLink::note_arrival(Started& message) {
  message.arrived = events_.take();
  message.arrived->record(edge_->stream().handle());
}

Arrival NcclReceiveLink::receive(Stream stream, const WaitPolicy& /*policy*/, WaitHistory& /*history*/) {
  if (started_.empty()) {
    throw Error(Fault::usage, "a message is used before its receive was issued: the program was not verified");
  }
  const cuda::Current current(edge_->gpu());
  Started next = std::move(started_.front());
  started_.pop_front();
  if (next.arrived) await(*std::move(next.arrived), handle(stream));
  return std::move(next.arrival);
}

void NcclReceiveLink::release(const Slot& slot, Stream stream) {
  Lane& lane = lanes_[slot.channel];
  lane.alive -= 1;
  if (slot.generation != lane.generation) return;  // a slot of the memory before it grew
  const cuda::Current current(edge_->gpu());
  cuda::Event read = events_.take();
  read.record(handle(stream));
  lane.free.push_back({slot.index, std::move(read)});
}

}  // namespace pypipe
