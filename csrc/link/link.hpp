// The contract of a link: one directed rank-to-rank FIFO for one kind of traffic (forward or backward).
//
// A link moves messages; it knows nothing of tensors. The sender gathers the parts of a message; the receiver finds
// them in one slot. All work is ordered on a Stream. On a CPU that is the host itself, and a call has done its work when
// it returns; on a GPU the call enqueues the work and returns. So a channel works the same on both:
//
//   sender    reserve()   sets the size of a channel's slots: at its first layout, and when a layout outgrows them
//             send()      reads the parts after all earlier work of the stream
//             sent()      how many messages have been read: their parts may now be freed or overwritten
//             finish()    later work of the stream may overwrite the parts of all messages so far
//   receiver  begin()     the channel's messages from now on will be those of an earlier run, in all but their bytes
//             post()      one more receive may be started, into a free slot, after earlier work of the stream
//             receive()   the next message; the stream's later work sees its bytes
//             release()   the slot may be overwritten after earlier work of the stream
//
// Both ends use the channels of a link in the same order. One thread uses a link end at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/action.hpp"
#include "base/wait.hpp"

namespace pypipe {

// A CUstream on a GPU, nothing on a CPU.
struct Stream {
  void* handle = nullptr;
};

// What a receiver expects of a message, and checks.
struct MessageTag {
  std::uint32_t stage = 0;          // the stage that sends
  ActionKind kind = ActionKind::F;  // of what is sent: F's output, B's gradient, or weights (W)
  std::uint32_t microbatch = 0;
  std::uint32_t run = 0;  // 2 M, and 1 more in eval(): ranks must agree on both
};

// What travels with each message: the tag that the receiver checks, and how much of the batch it is.
struct Envelope {
  std::uint32_t channel = 0;
  std::uint32_t stage = 0;  // the stage that sends
  std::uint32_t kind = 0;   // ActionKind, unless the peer sent something else
  std::uint32_t microbatch = 0;
  std::uint32_t layout = 0;
  std::uint32_t run = 0;  // 2 M, and 1 more in eval()
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;        // of this microbatch
  std::uint64_t batch_rows = 0;  // of the whole batch
};

// What to do about two ranks whose messages are of different runs.
[[nodiscard]] inline std::string run_difference(std::uint32_t got, std::uint32_t expected, int peer) {
  if (got % 2 != expected % 2) return "one rank called step(), the other eval(); call the same one on every rank";
  return "rank " + std::to_string(peer) + " cuts its batch into " + std::to_string(got / 2) +
         " microbatches, this rank into " + std::to_string(expected / 2) +
         "; give every rank the same n_microbatches, or as many microbatches";
}

// One contiguous piece of a message.
struct Part {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::size_t offset = 0;  // in the message
};

// Where a message lies. `owner` keeps the memory mapped while the slot is in use.
struct Slot {
  std::uint32_t channel = 0;
  std::uint32_t generation = 0;  // counts the reserve() calls of the channel
  std::uint32_t index = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> owner;
};

struct Arrival {
  Envelope envelope;
  Slot slot;
};

class SendLink {
 public:
  SendLink() = default;
  SendLink(const SendLink&) = delete;
  SendLink& operator=(const SendLink&) = delete;
  virtual ~SendLink() = default;

  // From the next message on, `channel` has `slots` slots of `bytes` bytes each.
  virtual void reserve(std::uint32_t channel, std::uint32_t slots, std::size_t bytes, const WaitPolicy& policy) = 0;

  // Waits until a slot is free; on a GPU only for the host's part. `history`: how long this message waited in earlier
  // steps. Returns the message's number on this link, from 1. Throws Error{timeout, peer_gone, aborted}.
  virtual std::uint64_t send(const Envelope& envelope, std::span<const Part> parts, Stream stream,
                             const WaitPolicy& policy, WaitHistory& history) = 0;

  // Whether send() would find a slot of `channel` free; false if only send() can tell. Never waits.
  [[nodiscard]] virtual bool has_room(std::uint32_t /*channel*/) { return false; }

  // How many of the messages so far no longer need their parts. Never waits.
  [[nodiscard]] virtual std::uint64_t sent() = 0;

  // Nothing to do if send() has read the parts itself.
  virtual void finish(Stream /*stream*/) {}
};

class ReceiveLink {
 public:
  ReceiveLink() = default;
  ReceiveLink(const ReceiveLink&) = delete;
  ReceiveLink& operator=(const ReceiveLink&) = delete;
  virtual ~ReceiveLink() = default;

  // Begins a run of this number, in which the channel's messages are promised to be those of the first run of the same
  // number, one by one: same envelopes, other bytes. Without it nothing is promised.
  virtual void begin(std::uint32_t /*channel*/, std::uint32_t /*run*/) {}

  // Sets a free slot of `channel` aside for the next message. May wait until that is announced.
  virtual void post(std::uint32_t channel, Stream stream, const WaitPolicy& policy) = 0;

  // The next message of the link. `history`: how long the wait for it took in earlier steps. Throws Error{timeout,
  // peer_gone, aborted, protocol}.
  [[nodiscard]] virtual Arrival receive(Stream stream, const WaitPolicy& policy, WaitHistory& history) = 0;

  virtual void release(const Slot& slot, Stream stream) = 0;
};

}  // namespace pypipe
