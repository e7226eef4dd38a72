// The contract of a link: one directed rank-to-rank FIFO for one kind of traffic (forward or backward).
//
// A link moves messages; it knows nothing of tensors. The sender gathers the parts of a message; the receiver finds
// them in one slot. All work is ordered on a Stream: on a CPU that is the host itself, and a call has done its work
// when it returns; on a GPU the call enqueues it and the host goes on. So a channel never asks which one it is:
//
//   sender    reserve()   a channel needs slots of some size: at its first layout, and when one outgrows them
//             send()      reads the parts after all earlier work of the stream
//             sent()      how many messages have been read for good: only then may their parts be freed or overwritten
//             finish()    later work of the stream may overwrite the parts of all messages so far
//   receiver  post()      one more receive may be started, into a free slot, after earlier work of the stream
//             receive()   the next message; the stream's later work sees its bytes
//             release()   the slot may be overwritten after earlier work of the stream
//
// Both ends use the channels of a link in the same order. One thread uses a link end at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

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
  bool evaluates = false;  // sent in eval(), which ranks must not mix with step()
};

// What travels with each message: the tag that the receiver checks, and how much of the batch it is.
struct Envelope {
  std::uint32_t channel = 0;
  std::uint32_t stage = 0;  // the stage that sends
  std::uint32_t kind = 0;   // ActionKind, unless the peer sent something else
  std::uint32_t microbatch = 0;
  std::uint32_t layout = 0;
  std::uint32_t evaluates = 0;  // sent in eval()
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;        // of this microbatch
  std::uint64_t batch_rows = 0;  // of the whole batch
};

// One contiguous piece of a message.
struct Part {
  const void* data = nullptr;
  std::size_t bytes = 0;
  std::size_t offset = 0;  // in the message
};

// Where a message lies. `owner` keeps the memory mapped for as long as anybody looks at it.
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
  virtual void reserve(std::uint32_t channel, std::uint32_t slots, std::size_t bytes, const Patience& patience) = 0;

  // Waits (on the host, for the host's part only) until a slot is free. Throws Error{timeout, peer_gone,
  // aborted}. `habit`: how long this message has waited in other steps.
  // Returns the message's number on this link, from 1.
  virtual std::uint64_t send(const Envelope& envelope, std::span<const Part> parts, Stream stream,
                             const Patience& patience, Habit& habit) = 0;

  // Whether send() would find a slot of `channel` free. False where only send() can tell. Never waits.
  [[nodiscard]] virtual bool has_room(std::uint32_t /*channel*/) { return false; }

  // Of the messages so far, how many no longer need their parts. Never waits.
  [[nodiscard]] virtual std::uint64_t sent() = 0;

  // Nothing to do where send() itself has read the parts.
  virtual void finish(Stream /*stream*/) {}
};

class ReceiveLink {
 public:
  ReceiveLink() = default;
  ReceiveLink(const ReceiveLink&) = delete;
  ReceiveLink& operator=(const ReceiveLink&) = delete;
  virtual ~ReceiveLink() = default;

  // The program takes a free slot of `channel` for a message to come. Never blocks.
  virtual void post(std::uint32_t channel, Stream stream, const Patience& patience) = 0;

  // The next message of the link. Throws Error{timeout, peer_gone, aborted, protocol}. `habit`: how long it has been
  // waited for in other steps.
  [[nodiscard]] virtual Arrival receive(Stream stream, const Patience& patience, Habit& habit) = 0;

  virtual void release(const Slot& slot, Stream stream) = 0;
};

}  // namespace pypipe
