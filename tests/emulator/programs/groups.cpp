// groups WHAT: what ncclGroupStart and ncclGroupEnd make of creations, finalizations and aborts.
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "choose.hpp"
#include "pair.hpp"

namespace pypipe::test {
namespace {

using std::chrono::milliseconds;

// Two ranks that create the same communicators in different orders meet within a group, blocking or not.
void creation(Rank& rank, bool blocking) {
  Stream wire("wire");
  const nccl::UniqueId first = shared_id(rank);
  const nccl::UniqueId second = shared_id(rank);
  group_start();
  Communicator one(rank, "one", blocking, rank.number == 0 ? first : second, Communicator::Unsettled());
  check(one.handle != nullptr, "the handle is not set at the call");
  Communicator other(rank, "other", blocking, rank.number == 0 ? second : first, Communicator::Unsettled());
  const nccl::Result ended = ncclGroupEnd();
  check(ended == (blocking ? nccl::Result::success : nccl::Result::in_progress), "the end of the group");
  check(one.settle() == nccl::Result::success && other.settle() == nccl::Result::success, "not created");
  Communicator& same = rank.number == 0 ? one : other;
  same.warm_up(wire);
  // Finalized in different orders too, within a group: each waits for the peer's.
  group_start();
  CALL(ncclCommFinalize(one.handle));
  CALL(ncclCommFinalize(other.handle));
  CALL(ncclGroupEnd());
  check(one.settle() == nccl::Result::success && other.settle() == nccl::Result::success, "not finalized");
  check(hazards() == 0, "something legal was reported");
}

// One that fails ends the others, which have nobody to meet.
void failure() {
  nccl::UniqueId id{};
  CALL(ncclGetUniqueId(&id));
  nccl::UniqueId wrong{};
  nccl::CommunicatorHandle lonely = nullptr;
  nccl::CommunicatorHandle nonsense = nullptr;
  nccl::Config config;
  config.version = 23007;
  group_start();
  CALL(ncclCommInitRankConfig(&lonely, 2, id, 0, &config));
  CALL(ncclCommInitRankConfig(&nonsense, 2, wrong, 0, &config));
  check(ncclGroupEnd() == nccl::Result::system_error, "a failure was not told");
  nccl::Result state = nccl::Result::success;
  CALL(ncclCommGetAsyncError(lonely, &state));
  check(state == nccl::Result::internal_error, "the other communicator of the group goes on");
  CALL(ncclCommAbort(lonely));
  CALL(ncclCommAbort(nonsense));
  check(hazards() == 0, "something legal was reported");
}

void mixed() {
  nccl::UniqueId id{};
  CALL(ncclGetUniqueId(&id));
  nccl::CommunicatorHandle blocking = nullptr;
  nccl::CommunicatorHandle other = nullptr;
  nccl::Config config;
  config.version = 23007;
  config.blocking = 1;
  group_start();
  CALL(ncclCommInitRankConfig(&blocking, 1, id, 0, &config));
  config.blocking = 0;
  check(ncclCommInitRankConfig(&other, 1, id, 0, &config) == nccl::Result::invalid_argument, "a mixed group");
  check(other == nullptr, "a communicator that was refused has a handle");
  expect_report("usage", "Blocking and nonblocking communicators");
  check(ncclGroupEnd() == nccl::Result::invalid_argument, "the end of a mixed group");
  CALL(ncclCommAbort(blocking));
}

// Another thread ends a creation that waits for a rank that never comes.
void abandoned() {
  nccl::UniqueId id{};
  CALL(ncclGetUniqueId(&id));
  std::atomic<nccl::CommunicatorHandle> made{nullptr};
  std::atomic<bool> failed{false};
  std::thread creator([&] {
    nccl::Config config;
    config.version = 23007;
    nccl::CommunicatorHandle handle = nullptr;
    group_start();
    CALL(ncclCommInitRankConfig(&handle, 2, id, 0, &config));
    made = handle;
    failed = ncclGroupEnd() != nccl::Result::success;
  });
  while (made == nullptr) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(5));
  CALL(ncclCommAbort(made));
  creator.join();
  check(failed, "an aborted creation succeeded");
  check(hazards() == 0, "something legal was reported");
}

// A call that waits for the peer returns an error when its communicator is aborted; and nothing but an abort ends what
// has failed.
void interrupted(Rank& rank) {
  Stream wire("wire");
  const DeviceMemory memory(100);
  Communicator link(rank, "link", true);
  Communicator other(rank, "other", true);
  if (rank.number == 0) {
    std::atomic<bool> calls{false};
    std::thread sender([&] {
      group_start();
      link.send(memory, wire);
      other.send(memory, wire);
      calls = true;
      check(ncclGroupEnd() == nccl::Result::internal_error, "a call on an aborted communicator succeeded");
    });
    while (!calls) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(5));
    link.abort();
    sender.join();
    check(wire.finish(), "an aborted call left something in the stream");
    check(hazards() == 0, "something legal was reported");
    check(ncclCommDestroy(other.handle) == nccl::Result::internal_error, "a communicator that failed was destroyed");
    expect_report("usage", "only ncclCommAbort can end it");
    other.abort();
  }
  rank.barrier();
  if (rank.number == 1) abort_all({&link, &other});
  check(hazards() == 0, "something legal was reported");
}

}  // namespace
}  // namespace pypipe::test

int main(int argc, char** argv) {
  using namespace pypipe::test;
  return choose(argc, argv,
                {
                    {"creation_blocking", [] { run_pair([](Rank& rank) { creation(rank, true); }); }},
                    {"creation_nonblocking", [] { run_pair([](Rank& rank) { creation(rank, false); }); }},
                    {"failure", failure},
                    {"mixed", mixed},
                    {"abandoned", abandoned},
                    {"interrupted", [] { run_pair(interrupted); }},
                });
}
