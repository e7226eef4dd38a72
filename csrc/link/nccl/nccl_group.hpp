// One communicator for each pair of ranks, for an NCCL whose communicators must not run at once.
//
// Before 2.26, NCCL does not order the communicators of a device, and two that run at once may each hold what the other
// needs. In this mode a rank therefore issues everything in the program's order: transfers are held back until the end of
// a group (pypipe/program/single_communicator/groups.py), and are then issued as one NCCL group, in which the order of
// opposite transfers does not matter.
//
// A receive needs its envelope, so issue() waits for the peer's host. The program was lowered for this: all ranks list
// their exchanges in one order, so no two ranks wait for each other.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/wait.hpp"
#include "link/nccl/nccl_edge.hpp"

namespace pypipe {

class NcclGroup {
 public:
  struct Transfer {
    NcclEdge* edge;
    // Enqueues what must come before; may wait for the peer's host. Returns false if there is nothing to transfer.
    std::function<bool(const WaitPolicy&)> prepare;
    std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)> enqueue;
    std::function<void(std::uint64_t operation)> started;
  };

  // All transfers until the next issue() have the same peer.
  void add(Transfer transfer) { held_.push_back(std::move(transfer)); }

  // Issues the transfers that were held back. Throws Error{timeout, peer_gone, aborted}.
  void issue(const WaitPolicy& policy);

 private:
  std::vector<Transfer> held_;
};

}  // namespace pypipe
