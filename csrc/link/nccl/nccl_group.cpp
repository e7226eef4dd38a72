#include "link/nccl/nccl_group.hpp"

#include <utility>

#include "base/error.hpp"

namespace pypipe {

void NcclGroup::issue(const WaitPolicy& policy) {
  if (held_.empty()) return;
  const std::vector<Transfer> held = std::exchange(held_, {});
  NcclEdge* const edge = held.front().edge;
  std::vector<const Transfer*> together;
  for (const Transfer& transfer : held) {
    if (transfer.edge != edge) throw Error(Fault::usage, "one NCCL group has transfers with two ranks");
    if (transfer.prepare(policy)) together.push_back(&transfer);
  }
  if (together.empty()) return;
  const nccl::Api& nccl = edge->nccl();
  const std::uint64_t operation = edge->run(
      [&](nccl::CommunicatorHandle communicator, cuda::StreamHandle stream) {
        nccl.check(nccl.group_start());
        for (const Transfer* transfer : together) transfer->enqueue(communicator, stream);
        nccl.check(nccl.group_end());
      },
      policy);
  for (const Transfer* transfer : together) transfer->started(operation);
}

}  // namespace pypipe
