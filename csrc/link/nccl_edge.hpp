// What one end of an NCCL link owns: a communicator of two ranks, the stream that all its operations use, and the
// list of those that have not ended.
//
// Threads. The host thread that runs the program calls everything but watch(); the watchdog's thread calls watch() and
// abort(). `mutex_` guards the communicator handle against being aborted in the middle of a call, and the list.
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
#include "link/cuda_stream.hpp"
#include "link/nccl_api.hpp"

namespace pypipe {

using NcclPointer = std::shared_ptr<const nccl::Api>;

struct NcclOptions {
  int min_ctas = 1;
  int max_ctas = 4;  // a link is one point-to-point transfer at a time: more would take SMs from compute
};

// The end of a link; in its communicator the sender is rank 0 and the receiver rank 1.
class NcclEdge {
 public:
  enum class Side { sender, receiver };

  // Joins the communicator; returns when the other end has joined too, and the edge is connected: a first message has
  // gone through it. Throws Error{system, timeout}.
  NcclEdge(cuda::ApiPointer cuda, NcclPointer nccl, const nccl::UniqueId& id, Side side, std::string name,
           const NcclOptions& options, const Patience& patience);
  NcclEdge(const NcclEdge&) = delete;
  NcclEdge& operator=(const NcclEdge&) = delete;
  // Aborts the communicator unless close() was called.
  ~NcclEdge();

  // Enqueues one operation on the edge's stream, after what `before` holds, and returns the number of operations
  // enqueued so far. `enqueue` calls NCCL. When this returns the call is no longer in progress, so that an event
  // recorded now means the operation's end.
  std::uint64_t run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue,
                    const Patience& patience);

  // How many operations have ended, of those that run() has counted. Never waits.
  std::uint64_t ended();

  // Called by the watchdog: what is wrong, if anything is. An operation is stuck when it has been the oldest one for
  // longer than `limit`.
  [[nodiscard]] std::optional<std::string> watch(std::chrono::steady_clock::duration limit);

  // Ends everything outstanding. Any thread; idempotent.
  void abort() noexcept;

  // Waits for what is outstanding and takes the communicator down, or aborts it when that does not end in time.
  void close(const Patience& patience) noexcept;

  [[nodiscard]] const cuda::Stream& stream() const noexcept { return stream_; }
  [[nodiscard]] const cuda::ApiPointer& cuda() const noexcept { return cuda_; }
  [[nodiscard]] const nccl::Api& nccl() const noexcept { return *nccl_; }

  // Registers memory for copies without staging, where this NCCL can. Returns a handle, or null.
  [[nodiscard]] void* register_memory(void* data, std::size_t bytes);
  // Before the memory is freed. Null, and what an aborted or closed communicator has forgotten, do no harm.
  void deregister_memory(void* handle) noexcept;

 private:
  struct Operation {
    cuda::Event ended;
    std::chrono::steady_clock::time_point since;
  };
  void connect(Side side, const Patience& patience);
  void reap();

  cuda::ApiPointer cuda_;
  NcclPointer nccl_;
  std::string name_;  // NCCL keeps the pointer
  cuda::Context context_ = nullptr;
  cuda::Stream stream_;
  cuda::EventPool events_;
  std::mutex mutex_;
  nccl::CommunicatorHandle communicator_ = nullptr;
  std::atomic<bool> aborting_{false};  // tells a call that holds the mutex to give it up
  bool aborted_ = false;
  std::deque<Operation> operations_;
  std::uint64_t started_ = 0;
  std::set<void*> registrations_;
};

}  // namespace pypipe
