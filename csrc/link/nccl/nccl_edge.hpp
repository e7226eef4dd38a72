// What one end of an NCCL link owns: a communicator of two ranks, the stream of all its operations, and the list of
// operations that have not ended. Where two ranks share one communicator (nccl_group.hpp), all links between them share
// one edge. A rank's communicators are made and ended together: see nccl_edges.hpp.
//
// Threads, and what each may do with the communicator:
//   host       run(): the only calls of NCCL in a step. in_call_ is set meanwhile, and aborting_ keeps new ones out
//   watchdog   asks for asynchronous errors, in watch()
//   NcclEdges  makes it, and takes it out by take_communicator() to close or abort it
// The watchdog's thread is joined before anybody but itself closes or aborts. So NCCL's own locks are all that two calls
// can meet at, and mutex_, which guards the list of operations, the two flags and the handle, is held across no call of NCCL and
// none that could wait for the device: ended(), which Python asks at every send, never waits for either.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "link/nccl/cuda_gpu.hpp"
#include "link/nccl/cuda_stream.hpp"
#include "link/nccl/nccl_api.hpp"

namespace pypipe {

using NcclPointer = std::shared_ptr<const nccl::Api>;

class NcclEdge {
 public:
  // Where messages go: from rank 0 to rank 1 of the communicator; both ways; or from its only rank to itself, which
  // takes a group, since such a send and its receive must be issued together.
  enum class Direction { one_way, both_ways, to_itself };

  // `ctas`: the most thread blocks that the communicator may take, the same at both ends.
  NcclEdge(cuda::GpuPointer gpu, NcclPointer nccl, const nccl::UniqueId& id, int rank, Direction direction,
           std::string name, int ctas);
  NcclEdge(const NcclEdge&) = delete;
  NcclEdge& operator=(const NcclEdge&) = delete;

  // The other end's rank in the communicator.
  [[nodiscard]] int peer() const noexcept { return size_ - 1 - rank_; }

  // Enqueues one operation on the edge's stream, and returns the number of operations enqueued so far. `enqueue` calls
  // NCCL. An event that is recorded when this returns marks the operation's end. Throws Error{aborted}.
  std::uint64_t run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue);

  // How many of the operations of run() have ended. Never waits.
  std::uint64_t ended();

  // Work that is enqueued on `stream` from now on runs after this operation. Called by the thread that calls run().
  void hold_up(cuda::StreamHandle stream, std::uint64_t operation);

  // For the watchdog: what is wrong, if anything. An operation is overdue when it has been the oldest one for longer
  // than `limit`; restart_timer() gives it as long again.
  struct Problem {
    std::string what;
    bool overdue = false;
  };
  [[nodiscard]] std::optional<Problem> watch(std::chrono::steady_clock::duration limit);
  void restart_timer();

  [[nodiscard]] const cuda::Stream& stream() const noexcept { return stream_; }
  [[nodiscard]] const cuda::Gpu& gpu() const noexcept { return *gpu_; }
  [[nodiscard]] const cuda::GpuPointer& shared_gpu() const noexcept { return gpu_; }
  [[nodiscard]] const cuda::ApiPointer& cuda() const noexcept { return gpu_->api(); }
  [[nodiscard]] const nccl::Api& nccl() const noexcept { return *nccl_; }

 private:
  friend class NcclEdges;
  struct Operation {
    cuda::Event ended;
    std::chrono::steady_clock::time_point since;
  };
  // Begins to make the communicator, inside a group.
  void make();
  // Enqueues the first message, inside a group.
  void greet(std::uint64_t* words);
  void reap();  // with the lock

  // Refuses new calls from now on.
  void mark_aborting() noexcept;
  [[nodiscard]] bool is_aborting() noexcept;
  // Waits until no call of run() is under way, or until the deadline.
  void wait_for_calls(std::chrono::steady_clock::time_point deadline) noexcept;
  [[nodiscard]] nccl::CommunicatorHandle take_communicator() noexcept;

  const cuda::GpuPointer gpu_;
  const NcclPointer nccl_;
  const nccl::UniqueId id_;
  const Direction direction_;
  const int size_;
  const int rank_;
  const std::string name_;  // NCCL keeps the pointer
  const int ctas_;
  const cuda::Stream stream_;

  nccl::CommunicatorHandle communicator_ = nullptr;
  std::mutex mutex_;
  std::condition_variable called_;
  bool in_call_ = false;
  bool aborting_ = false;
  std::deque<Operation> operations_;
  cuda::EventPool events_;
  std::uint64_t started_ = 0;
};

}  // namespace pypipe
