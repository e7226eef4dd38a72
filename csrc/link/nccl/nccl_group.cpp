#include "link/nccl/nccl_group.hpp"

#include <utility>

#include "base/error.hpp"

namespace pypipe {

void issue(const NcclTransfer& transfer, const WaitPolicy& policy) {
  if (transfer.prepare(policy)) transfer.started(transfer.edge->run(transfer.enqueue));
}

void NcclGroup::issue(const WaitPolicy& policy) {
  if (held_.empty()) return;
  const std::vector<NcclTransfer> held = std::exchange(held_, {});
  NcclEdge* const edge = held.front().edge;
  std::vector<const NcclTransfer*> together;
  for (const NcclTransfer& transfer : held) {
    if (transfer.edge != edge) throw Error(Fault::usage, "one NCCL group has transfers with two ranks");
    if (transfer.prepare(policy)) together.push_back(&transfer);
  }
  if (together.empty()) return;
  const nccl::Api& nccl = edge->nccl();
  const cuda::Current current(edge->gpu());
  const std::uint64_t operation = edge->run([&](nccl::CommunicatorHandle communicator, cuda::StreamHandle stream) {
    nccl.check(nccl.group_start());
    for (const NcclTransfer* transfer : together) transfer->enqueue(communicator, stream);
    nccl.check(nccl.group_end());
  });
  for (const NcclTransfer* transfer : together) transfer->started(operation);
}

}  // namespace pypipe
