// One communicator for each pair of ranks, for an NCCL whose communicators must not run at once.
//
// Before 2.26 NCCL gives no order to the communicators of a device, and two that run at once may each hold what the
// other needs. So in this mode a rank issues everything in one order, the program's: transfers are held back until the
// program comes to the end of a group (pypipe/program/grouping.py), and then go out as one NCCL group, in which
// opposite ones need no order.
//
// A receive needs its envelope, so issue() waits for the peer's host. The program was lowered for this: all ranks list
// what they exchange in one order, so nobody waits for somebody who waits for him.
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
    // Enqueues what comes before; may wait for the peer's host. False: there is nothing to transfer.
    std::function<bool(const Patience&)> prepare;
    std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)> enqueue;
    std::function<void(std::uint64_t operation)> started;
  };

  // All with the same peer until the next issue().
  void add(Transfer transfer) { held_.push_back(std::move(transfer)); }

  // Issues what is held back. Throws Error{timeout, peer_gone, aborted}.
  void issue(const Patience& patience);

 private:
  std::vector<Transfer> held_;
};

}  // namespace pypipe
