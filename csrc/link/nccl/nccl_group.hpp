// Transfers between two ranks, issued one by one or together.
//
// As a rule each link has a communicator, and a transfer is issued when the program gets to it. Where so many would take
// too much of the device, each pair of ranks has one communicator for all of their links. That runs one operation after
// another, so transfers are held back until the end of a group (pypipe/program/groups.py) and issued as one NCCL group,
// in which both directions run at once.
//
// A receive needs its envelope, so to issue it is to wait for the peer's host. The program was lowered for this: all ranks
// list their exchanges in one order (pypipe/program/exchanges.py), so no two ranks wait for each other.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/wait.hpp"
#include "link/nccl/nccl_edge.hpp"

namespace pypipe {

struct NcclTransfer {
  NcclEdge* edge;
  // Enqueues what must come before; may wait for the peer's host. Returns false if there is nothing to transfer.
  std::function<bool(const WaitPolicy&)> prepare;
  std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)> enqueue;
  std::function<void(std::uint64_t operation)> started;
};

// Issues one transfer at once. Throws Error{timeout, peer_gone, aborted}.
void issue(const NcclTransfer& transfer, const WaitPolicy& policy);

class NcclGroup {
 public:
  // All transfers until the next issue() have the same peer.
  void add(NcclTransfer transfer) { held_.push_back(std::move(transfer)); }

  // Issues the transfers that were held back. Throws Error{timeout, peer_gone, aborted}.
  void issue(const WaitPolicy& policy);

 private:
  std::vector<NcclTransfer> held_;
};

}  // namespace pypipe
