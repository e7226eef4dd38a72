// The link between two GPUs: ncclSend and ncclRecv on a stream of the link's own.
//
// Order, of everything that touches a message (-> is "an event of the left is waited for by the right"):
//   sender    compute that made the tensors -> ncclSend; the tensors are kept until sent() includes the message
//             last ncclSend of a step -> compute after the step, which may overwrite what was sent (an input, a buffer)
//   receiver  compute that read the slot's last message -> ncclRecv -> compute that reads this one
//   sender    ncclSend of message n - slots -> compute after message n: a sender that runs ahead keeps no more messages
//             than the channel has slots
// The host only enqueues, and waits for one thing: the envelope, which the sender's host sends over the control socket
// when it issues the send. Without it the receiver knows neither the size nor the layout. post() waits for it, so that a
// receive is on the device where the program says. Where envelopes are promised (begin()), it does not wait: the
// receive is what it was in the first run, and the envelope is compared when it comes. Programs are lowered for that
// (pypipe/program/exchanges.py), and it is what lets a host wait for its device anywhere: the other end of each transfer
// that it has issued is issued too, or will be by a rank that does not wait for this one.
//
// One tensor is sent from where it lies. Several are packed by the link's stream into one staging buffer and sent with
// one ncclSend: the receiver then posts one receive of one size for any tree. One staging buffer is enough, since the
// stream's order protects it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "control/hub.hpp"
#include "link/link.hpp"
#include "link/nccl/cuda_stream.hpp"
#include "link/nccl/nccl_edge.hpp"
#include "link/nccl/nccl_group.hpp"

namespace pypipe {

// Returns device memory, which is freed with the last copy of the pointer.
using Allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

class NcclSendLink final : public SendLink {
 public:
  // With a group, messages are sent by its next issue().
  NcclSendLink(Hub& hub, int peer, std::uint32_t link, std::shared_ptr<NcclEdge> edge, Allocate allocate,
               std::shared_ptr<NcclGroup> group);
  ~NcclSendLink() override;

  void reserve(std::uint32_t channel, std::uint32_t slots, std::size_t bytes, const WaitPolicy& policy) override;
  std::uint64_t send(const Envelope& envelope, std::span<const Part> parts, Stream stream, const WaitPolicy& policy,
                     WaitHistory& history) override;
  [[nodiscard]] std::uint64_t sent() override;
  void finish(Stream stream) override;

 private:
  // Where messages of several parts are packed. Its last reader is the link's own stream.
  struct Staging {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
  };
  struct Outgoing {
    const void* data = nullptr;
    std::size_t bytes = 0;
  };
  // Makes the stream wait for the message that is `slots` before this one.
  void limit(std::uint32_t channel, Stream stream);
  Outgoing prepare(const Envelope& envelope, std::span<const Part> parts, Stream stream);
  [[nodiscard]] std::byte* staging(std::size_t bytes);
  void enqueue(const Outgoing& message, nccl::CommunicatorHandle communicator, cuda::StreamHandle on) const;

  Hub& hub_;
  const int peer_;
  const std::uint32_t link_;
  std::shared_ptr<NcclEdge> edge_;
  Allocate allocate_;
  std::shared_ptr<NcclGroup> group_;
  cuda::Event made_;
  cuda::Event left_;
  std::vector<Staging> stagings_;  // one, or more if a group has several messages
  std::size_t packed_ = 0;         // how many of them the current group has filled
  std::deque<std::pair<std::uint64_t, std::shared_ptr<void>>> outgrown_;  // with the last message that used it
  std::uint64_t messages_ = 0;
  std::uint64_t awaited_ = 0;                     // up to this message, the compute stream waits for what has not ended
  std::map<std::uint32_t, std::uint32_t> slots_;  // of each channel
  std::map<std::uint32_t, std::deque<std::uint64_t>> unlimited_;  // messages of each channel that nothing waits for yet
  // For each message that may still be in flight, how many operations the edge had started by then.
  std::deque<std::uint64_t> operations_;
};

class NcclReceiveLink final : public ReceiveLink {
 public:
  // `slots`: how many, for each channel of the link.
  NcclReceiveLink(Hub& hub, int peer, std::uint32_t link, std::shared_ptr<NcclEdge> edge, Allocate allocate,
                  const std::map<std::uint32_t, std::uint32_t>& slots, std::shared_ptr<NcclGroup> group);
  ~NcclReceiveLink() override;

  void begin(std::uint32_t channel, std::uint32_t run) override;
  void post(std::uint32_t channel, Stream stream, const WaitPolicy& policy) override;
  [[nodiscard]] Arrival receive(Stream stream, const WaitPolicy& policy, WaitHistory& history) override;
  void release(const Slot& slot, Stream stream) override;

 private:
  struct Place {
    std::uint32_t index;
    std::optional<cuda::Event> read;  // the slot's last reader; nothing for a slot that was never used
  };
  struct Lane {
    std::uint32_t slots = 0;
    std::uint32_t generation = 0;
    std::uint32_t alive = 0;  // over all generations
    std::size_t bytes = 0;
    std::shared_ptr<void> memory;
    std::vector<Place> free;
  };
  struct Started {
    Arrival arrival;
    std::optional<cuda::Event> arrived;
  };
  NcclTransfer transfer(std::uint32_t channel, Stream stream);
  // Assigns a slot to a message, and makes the link's stream wait until the slot may be overwritten.
  Started& place(const Envelope& envelope, Stream stream);
  void enqueue(const Arrival& message, nccl::CommunicatorHandle communicator, cuda::StreamHandle on) const;
  void note_arrival(Started& message);
  // The envelope of the channel's next message: the promised one, or the one that comes.
  [[nodiscard]] Envelope next(std::uint32_t channel, const WaitPolicy& policy);
  // Compares an envelope that has come with the oldest one that was promised and used.
  void check(const Envelope& got);
  void grow(Lane& lane, std::size_t bytes, Stream stream);
  // Makes a stream wait for an event, and returns the event to the pool.
  void await(cuda::Event event, cuda::StreamHandle stream);

  Hub& hub_;
  const int peer_;
  const std::uint32_t link_;
  std::shared_ptr<NcclEdge> edge_;
  Allocate allocate_;
  std::shared_ptr<NcclGroup> group_;
  std::map<std::uint32_t, Lane> lanes_;
  cuda::EventPool events_;
  std::deque<Started> started_;
  // What the runs of a channel are made of.
  struct Promise {
    std::vector<Envelope> envelopes;
    bool kept = false;  // it is the second run at least
    std::size_t used = 0;
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, Promise> promises_;  // by channel and run
  std::map<std::uint32_t, Promise*> current_;                            // of each channel
  std::deque<Envelope> unseen_;                                          // promised and used, but not come yet
};

}  // namespace pypipe
