// How two ranks meet through a unique id, and the frames that they exchange then.
//
// The process that makes an id listens on an abstract Unix socket, whose name is in the id. Each rank says
// hello there; when all have come, the listener makes a socket pair and passes each its end (or refuses all
// of them, if they contradict each other). From then on the frames of a communicator go through that pair
// alone:
//
//   edge     "I use the edge on which I send / receive": the lazy connection
//   ready    receive n of the sender of this frame has started, and how many bytes it expects
//   data     the bytes of send n, and the clock of the stream that sent them
//   taken    receive n has taken a message that was staged: its bytes are free again
//   fault    the communicator failed on my side; the text says why
//   goodbye  I destroy the communicator in good order
//
// One thread per communicator reads (it only stores, so the other end never waits for room); writers take
// turns.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "clock.hpp"
#include "link/nccl/nccl_abi.hpp"

namespace pypipe::emulator {

enum class FrameKind : std::uint32_t { edge, ready, data, taken, fault, goodbye };

struct Frame {
  FrameKind kind = FrameKind::edge;
  std::uint64_t index = 0;
  std::uint64_t bytes = 0;
  bool flag = false;        // edge: sends. data: it was staged
  bool registered = false;  // data: it is sent from registered memory
  Clock clock;
  std::vector<std::byte> payload;
};

class Wire {
 public:
  Wire() = default;
  explicit Wire(Fd socket) noexcept : socket_(std::move(socket)) {}

  // Without the engine's lock: it may wait for the reader. A peer that is gone is not an error here.
  void write(const Frame& frame, const std::byte* payload = nullptr, std::size_t bytes = 0);
  // False at the end of the stream.
  bool read(Frame& frame);
  void shut() const noexcept;
  void open(Fd socket) noexcept { socket_ = std::move(socket); }
  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(socket_); }

 private:
  Fd socket_;
  std::mutex writing_;
};

// A new id; a thread of this process serves it.
nccl::Result make_unique_id(nccl::UniqueId& id, std::string& problem);

struct Meeting {
  nccl::Result result = nccl::Result::success;
  std::string problem;
  Fd socket;  // none for a single rank
};

// Connects to the id's listener; an invalid Fd when nobody listens.
Fd call_listener(const nccl::UniqueId& id, std::string& problem);
// Says hello and waits for the others. Another thread may shut the socket down to end the wait.
Meeting meet(int listener, int rank, int size, int version);

}  // namespace pypipe::emulator
