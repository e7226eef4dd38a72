// What one end of an NCCL link owns: a communicator of two ranks, the stream that all its operations use, and the
// list of those that have not ended. In the fallback (nccl_group.hpp) all links between two ranks share one.
//
// Threads. The host thread that runs the program calls everything but watch() and pardon(); the watchdog's thread calls
// these and abort(). `mutex_` guards the communicator handle against being aborted in the middle of a call, and the list.
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
  // What goes through it: from rank 0 to rank 1 of the communicator; also the other way; or from its only rank to that
  // rank, which takes a group, since a send to oneself needs its receive beside it.
  enum class Traffic { one_way, both_ways, to_itself };

  // Joins the communicator as its rank 0 or 1; returns when the other end has joined too, and the edge is connected: a
  // first message has gone through it. Throws Error{system, timeout}.
  NcclEdge(cuda::ApiPointer cuda, NcclPointer nccl, const nccl::UniqueId& id, int rank, Traffic traffic,
           std::string name, const NcclOptions& options, const Patience& patience);
  NcclEdge(const NcclEdge&) = delete;
  NcclEdge& operator=(const NcclEdge&) = delete;
  // Aborts the communicator unless it was closed.
  ~NcclEdge();

  // The other end's rank in the communicator.
  [[nodiscard]] int peer() const noexcept { return size_ - 1 - rank_; }

  // Enqueues one operation on the edge's stream, after what `before` holds, and returns the number of operations
  // enqueued so far. `enqueue` calls NCCL. When this returns the call is no longer in progress, so that an event
  // recorded now means the operation's end.
  std::uint64_t run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue,
                    const Patience& patience);

  // How many operations have ended, of those that run() has counted. Never waits.
  std::uint64_t ended();

  // Called by the watchdog: what is wrong, if anything is. An operation is overdue when it has been the oldest one for
  // longer than `limit`; pardon() gives it as long again.
  struct Trouble {
    std::string what;
    bool overdue = false;
  };
  [[nodiscard]] std::optional<Trouble> watch(std::chrono::steady_clock::duration limit);
  void pardon();

  // Ends everything outstanding. Any thread; idempotent.
  void abort() noexcept;

  // Takes the communicator down, for which both ends have to come: the first call says that this one has, the second
  // waits for what is outstanding and for the other end, and aborts when that does not come in time.
  void begin_close() noexcept;
  void end_close(const Patience& patience) noexcept;

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
  void connect(bool sends, bool receives, std::uint64_t* words, const Patience& patience);
  void settle(const Patience& patience);
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
  std::atomic<bool> aborting_{false};  // tells a call that holds the mutex to give it up
  bool aborted_ = false;
  std::deque<Operation> operations_;
  std::uint64_t started_ = 0;
  std::set<void*> registrations_;
};

}  // namespace pypipe
