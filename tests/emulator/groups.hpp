// Group calls of the calling thread, and how a group becomes kernels.
//
// ncclSend and ncclRecv collect; the end of the outermost group launches: per communicator one kernel, in the
// order in which the communicators were first used. If a communicator is non-blocking and an edge has to be
// connected first (or by chance), the launch happens on a background thread and the call answers
// ncclInProgress: until the communicator says otherwise, nothing of the group is in any stream.
#pragma once

#include "engine.hpp"
#include "link/nccl/nccl_abi.hpp"

namespace pypipe::emulator {

nccl::Result group_start();
nccl::Result group_end(Lock& lock);
nccl::Result transfer(Lock& lock, const char* name, const void* data, std::size_t count, int type, int peer,
                      nccl::CommunicatorHandle communicator, cuda::StreamHandle stream);

}  // namespace pypipe::emulator
