// Group calls of the calling thread, and what the end of the outermost group does.
//
// Everything that NCCL groups is a group: ncclSend outside of ncclGroupStart is one of its own. A group collects two
// kinds of work:
//
//   jobs       creations, finalizations, destructions and aborts. At the end all run at once, each on a thread of its
//              own (NCCL 2.28.9, src/group.cc: asyncJobLaunch); the first that fails stops those that still run.
//   transfers  per communicator one kernel, launched in the order of the communicators' hashes, whatever the order of
//              the calls (src/include/group.h: ncclGroupCommJoin). The edges that are used first are connected before,
//              all at once.
//
// A group is blocking or not, as its first communicator is; one of the other kind is refused (src/group.cc:
// ncclAsyncLaunch), but a group with a destruction or an abort blocks. A blocking group's end returns when all is made,
// connected and launched. A non-blocking one's goes on on a background thread and answers ncclInProgress: if there are
// jobs or an edge has to be connected, otherwise by chance (knob in_progress). Until a communicator says otherwise,
// nothing of the group is in any stream.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "link/nccl/nccl_abi.hpp"

namespace pypipe::emulator {

struct Job {
  std::shared_ptr<Communicator> communicator;
  bool reclaims = false;  // a destruction or an abort
  std::function<nccl::Result(Lock&)> run;
  std::function<void()> stop;  // another job of the group has failed; with the lock
};

nccl::Result group_start();
nccl::Result group_end(Lock& lock);
[[nodiscard]] bool in_group();

// What every function that NCCL groups does: `collect` within the current group, or as a group of its own.
nccl::Result grouped(Lock& lock, const std::function<nccl::Result()>& collect);
// Within one: refused if the communicator does not go with the group's others.
nccl::Result enlist(Job job);

nccl::Result transfer(Lock& lock, const char* name, const void* data, std::size_t count, int type, int peer,
                      nccl::CommunicatorHandle communicator, cuda::StreamHandle stream);

}  // namespace pypipe::emulator
