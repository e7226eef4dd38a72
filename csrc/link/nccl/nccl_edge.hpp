// What one end of an NCCL link owns: a communicator of two ranks, the stream of all its operations, and the list of
// operations that have not ended. In the fallback (nccl_group.hpp) all links between two ranks share one edge.
//
// Threads. The host thread that runs the program calls everything but watch() and restart_timer(); the watchdog's
// thread calls these and abort(). `mutex_` keeps the communicator from being aborted in the middle of a call, and guards
// the list.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "base/wait.hpp"
#include "link/nccl/cuda_stream.hpp"
#include "link/nccl/nccl_api.hpp"

namespace pypipe {

using NcclPointer = std::shared_ptr<const nccl::Api>;

struct NcclOptions {
  int min_ctas = 1;
  int max_ctas = 4;  // a link is one point-to-point transfer at a time: more would take SMs from compute
};

class NcclEdge {
 public:
  // Where messages go: from rank 0 to rank 1 of the communicator; both ways; or from its only rank to itself, which
  // takes a group, since such a send and its receive must be issued together.
  enum class Direction { one_way, both_ways, to_itself };

  // Joins the communicator as its rank 0 or 1. Returns when the other end has joined too and a first message has
  // connected the edge. Throws Error{system, timeout}.
  NcclEdge(cuda::ApiPointer cuda, NcclPointer nccl, const nccl::UniqueId& id, int rank, Direction direction,
           std::string name, const NcclOptions& options, const WaitPolicy& policy);
  NcclEdge(const NcclEdge&) = delete;
  NcclEdge& operator=(const NcclEdge&) = delete;
  // Aborts the communicator unless it was closed.
  ~NcclEdge();

  // The other end's rank in the communicator.
  [[nodiscard]] int peer() const noexcept { return size_ - 1 - rank_; }

  // Enqueues one operation on the edge's stream, and returns the number of operations enqueued so far. `enqueue` calls
  // NCCL. When this returns, that call is no longer in progress, so an event that is recorded now marks the operation's
  // end.
  std::uint64_t run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue,
                    const WaitPolicy& policy);

  // How many of the operations of run() have ended. Never waits.
  std::uint64_t ended();

  // For the watchdog: what is wrong, if anything. An operation is overdue when it has been the oldest one for longer
  // than `limit`; restart_timer() gives it as long again.
  struct Problem {
    std::string what;
    bool overdue = false;
  };
  [[nodiscard]] std::optional<Problem> watch(std::chrono::steady_clock::duration limit);
  void restart_timer();

  // Ends all outstanding operations. Any thread; idempotent.
  void abort() noexcept;

  // Destroys the communicator, which both ends have to do: begin_close() tells the other end, end_close() waits for it
  // and for outstanding operations, and aborts when the timeout passes.
  void begin_close() noexcept;
  void end_close(const WaitPolicy& policy) noexcept;

  [[nodiscard]] const cuda::Stream& stream() const noexcept { return stream_; }
  [[nodiscard]] const cuda::ApiPointer& cuda() const noexcept { return cuda_; }
  [[nodiscard]] const nccl::Api& nccl() const noexcept { return *nccl_; }

  // Registers memory for copies without staging, if this NCCL can. Returns a handle, or null.
  [[nodiscard]] void* register_memory(void* data, std::size_t bytes);
  // Call it before the memory is freed. Ignores null, and handles of an aborted or closed communicator.
  void deregister_memory(void* handle) noexcept;

 private:
  struct Operation {
    cuda::Event ended;
    std::chrono::steady_clock::time_point since;
  };
  void connect(bool sends, bool receives, std::uint64_t* words, const WaitPolicy& policy);
  void settle(const WaitPolicy& policy);
  void reap();

  cuda::ApiPointer cuda_;
  NcclPointer nccl_;
  const int size_;
  const int rank_;
  std::string name_;  // NCCL keeps the pointer
  cuda::Context context_ = nullptr;
  cuda::Stream stream_;
  cuda::EventPool events_;
  std::mutex mutex_;
  nccl::CommunicatorHandle communicator_ = nullptr;
  std::atomic<bool> aborting_{false};  // tells a call that holds the mutex to return
  bool aborted_ = false;
  std::deque<Operation> operations_;
  std::uint64_t started_ = 0;
  std::set<void*> registrations_;
};

}  // namespace pypipe
