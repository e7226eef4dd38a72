// All communicators of a rank: they are made, connected, closed and aborted together.
//
// Together, because each alone may wait for another one. To make them one by one is to wait for the peers one by one, in
// time that grows with the number of ranks. And ncclCommAbort waits for all kernels of its communicator that are queued
// (NCCL's src/init.cc, commDestroySync), which may stand behind a kernel of another communicator that spins until that
// one is aborted too; in 1F1B this is the steady state. Between ncclGroupStart and ncclGroupEnd every communicator is
// told before any is waited for (from 2.22 on; before, each gets a thread of its own).
//
// All of this may block without limit, as when a peer has died, so it is done by threads that are left to themselves
// when time is up (BoundedCall). They own what they use.
#pragma once

#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "link/nccl/nccl_edge.hpp"

namespace pypipe {

class NcclEdges {
 public:
  NcclEdges(cuda::GpuPointer gpu, NcclPointer nccl) : gpu_(std::move(gpu)), nccl_(std::move(nccl)) {}
  NcclEdges(const NcclEdges&) = delete;
  NcclEdges& operator=(const NcclEdges&) = delete;
  // What was neither closed nor aborted is aborted by a detached thread.
  ~NcclEdges();

  // See NcclEdge. Before connect().
  std::shared_ptr<NcclEdge> add(const nccl::UniqueId& id, int rank, NcclEdge::Direction direction, std::string name,
                                int ctas);

  // Makes all communicators and sends a first message on each, which connects it: NCCL connects at the first use and
  // blocks the host meanwhile, and that is to be done now rather than in the middle of a step. Returns when all peers
  // have done the same. Throws Error{system, timeout}.
  void connect(const WaitPolicy& policy);

  // Ends all operations, those that are queued too, and refuses new ones. Returns whether that was done within the
  // limit; if not, it goes on. Never throws, holds no lock meanwhile. One thread, whose turn it is (nccl_edge.hpp). In a
  // forked child, to which the communicators do not belong, it does nothing.
  bool abort(std::chrono::nanoseconds limit) noexcept;

  // Waits for outstanding operations and destroys the communicators, which the peers have to do too. Throws as connect()
  // does, and what `policy.interruption` throws; then everything is aborted.
  void close(const WaitPolicy& policy);

  [[nodiscard]] const cuda::Gpu& gpu() const noexcept { return *gpu_; }
  [[nodiscard]] const std::vector<std::shared_ptr<NcclEdge>>& all() const noexcept { return edges_; }

 private:
  using Edges = std::vector<std::shared_ptr<NcclEdge>>;
  using Handles = std::vector<nccl::CommunicatorHandle>;
  // Refuses new calls on all edges, waits for those under way until the deadline, and takes the communicators out.
  static Handles take_all(const Edges& edges, std::chrono::steady_clock::time_point deadline);

  const cuda::GpuPointer gpu_;
  const NcclPointer nccl_;
  const pid_t process_ = ::getpid();
  Edges edges_;
};

}  // namespace pypipe
