// failures WHAT: injected faults and real mistakes, and what each rank is told. Each ends with an abort, in time.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "pair.hpp"

namespace pypipe::test {
namespace {

using std::chrono::milliseconds;

std::string last_report() {
  std::string text(pypipe_emulator_last_report(nullptr, 0) + 1, 0);
  (void)pypipe_emulator_last_report(text.data(), text.size());
  return text;
}

nccl::Result wait_for_error(const Communicator& link) {
  for (int i = 0; i < 5000; ++i) {
    nccl::Result state = nccl::Result::success;
    CALL(ncclCommGetAsyncError(link.handle, &state));
    if (state != nccl::Result::success && state != nccl::Result::in_progress) return state;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return nccl::Result::success;
}

// An abort ends what hangs, at once, from another thread than the one that waits.
void abort_ends(Communicator& link, const Stream& wire) {
  Event event;
  event.record(wire.handle);
  check(!event.done(), "an operation that failed is done");
  std::thread watchdog([&] {
    std::this_thread::sleep_for(milliseconds(5));
    link.abort();
  });
  CALL(cuStreamWaitEvent(nullptr, event.handle, 0));
  watchdog.join();
}

struct Ends {
  explicit Ends(Rank& rank) : wire("wire"), memory(30000), link(rank, "link") { link.warm_up(wire); }
  void go(const Rank& rank) {
    if (rank.number == 0) {
      link.send(memory, wire);
    } else {
      link.receive(memory, wire);
    }
    (void)link.settle();
  }
  Stream wire;
  DeviceMemory memory;
  Communicator link;
};

// The sizes of the two ends differ, staged or not.
void size(Rank& rank, std::uint64_t staging) {
  knob("staging", staging);
  Ends ends(rank);
  if (rank.number == 0) {
    const std::string next = "size@" + std::to_string(pypipe_emulator_operations() + 1);
    check(pypipe_emulator_fault(next.c_str()) == 0, "no such fault");
  }
  ends.go(rank);
  const nccl::Result error = wait_for_error(ends.link);
  check(error == nccl::Result::internal_error || error == nccl::Result::remote_error, "no asynchronous error");
  if (rank.number == 1) {
    for (int i = 0; i < 5000 && hazards("size") == 0; ++i) std::this_thread::sleep_for(milliseconds(1));
    check(hazards("size") == 1, "the sizes were not compared");
    check(last_report().find("29999") != std::string::npos && last_report().find("30000") != std::string::npos,
          "not both sizes: " + last_report());
  }
  if (rank.number == 1) abort_ends(ends.link, ends.wire);
  rank.barrier();
  if (rank.number == 1) check(ends.memory.is(0xfb), "an aborted receive left something else than poison");
  if (rank.number == 0) ends.link.abort();
}

void error(Rank& rank) {
  Ends ends(rank);
  if (rank.number == 0) {
    const std::string next = "error@" + std::to_string(pypipe_emulator_operations() + 1);
    check(pypipe_emulator_fault(next.c_str()) == 0, "no such fault");
  }
  ends.go(rank);
  if (rank.number == 0) {
    check(wait_for_error(ends.link) == nccl::Result::remote_error, "no asynchronous error");
    check(ncclSend(ends.memory.data(), 1, nccl::uint8, 1, ends.link.handle, ends.wire.handle) ==
              nccl::Result::remote_error,
          "a communicator with an error goes on");
  }
  rank.barrier();
  abort_ends(ends.link, ends.wire);
  check(hazards() == 0, "an injected error counts as a hazard: " + last_report());
}

void hang(Rank& rank) {
  Ends ends(rank);
  if (rank.number == 0) {
    const std::string next = "hang@" + std::to_string(pypipe_emulator_operations() + 1);
    check(pypipe_emulator_fault(next.c_str()) == 0, "no such fault");
  }
  ends.go(rank);
  std::this_thread::sleep_for(milliseconds(5));
  nccl::Result state = nccl::Result::internal_error;
  CALL(ncclCommGetAsyncError(ends.link.handle, &state));
  check(state == nccl::Result::success, "a silent hang is told");
  rank.barrier();
  abort_ends(ends.link, ends.wire);
}

void version(Rank& rank) {
  if (rank.number == 1) knob("version", 21805);
  int answer = 0;
  CALL(ncclGetVersion(&answer));
  check(answer == (rank.number == 1 ? 21805 : 23007), "the version");
  nccl::UniqueId id{};
  if (rank.number == 0) {
    CALL(ncclGetUniqueId(&id));
    rank.put(&id, sizeof id);
  } else {
    rank.get(&id, sizeof id);
  }
  nccl::Config config;
  config.version = 21805;
  config.blocking = 1;
  nccl::CommunicatorHandle link = nullptr;
  check(ncclCommInitRankConfig(&link, 2, id, rank.number, &config) == nccl::Result::invalid_usage, "two versions met");
  nccl::Result state = nccl::Result::success;
  CALL(ncclCommGetAsyncError(link, &state));
  check(std::strstr(ncclGetLastError(link), "Mismatched NCCL version") != nullptr, "the error does not say why");
  CALL(ncclCommAbort(link));
}

// Rank 1 dies when its third receive starts. Over a network rank 0 is told; over NVLink it is not.
int die(bool told) {
  std::array<int, 2> down{};
  std::array<int, 2> up{};
  check(::pipe(down.data()) == 0 && ::pipe(up.data()) == 0, "pipe");
  const pid_t child = ::fork();
  Rank rank(child == 0 ? 1 : 0, child == 0 ? down[0] : up[0], child == 0 ? up[1] : down[1]);
  check(pypipe_emulator_set("death", told ? "error" : "silent") == 0, "no such knob");
  knob("staging", 0);
  if (child == 0) check(pypipe_emulator_fault("die@5") == 0, "no such fault");  // 2 of the warm-up, then the third
  Ends ends(rank);
  for (int i = 0; i < 3; ++i) ends.go(rank);
  if (child == 0) {
    (void)ends.wire.finish();
    fail("rank 1 lives");
  }
  int status = 0;
  check(::waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "rank 1 lives");
  if (told) check(wait_for_error(ends.link) == nccl::Result::remote_error, "the death was not told");
  std::this_thread::sleep_for(milliseconds(10));
  nccl::Result state = nccl::Result::success;
  CALL(ncclCommGetAsyncError(ends.link.handle, &state));
  if (!told) check(state == nccl::Result::success, "the death was told");
  abort_ends(ends.link, ends.wire);
  return 0;
}

}  // namespace
}  // namespace pypipe::test

int main(int argc, char** argv) {
  using namespace pypipe::test;
  const std::string what = argc == 2 ? argv[1] : "";
  if (what == "size_staged") {
    run_pair([](Rank& rank) { size(rank, 65536); });
  } else if (what == "size_not_staged") {
    run_pair([](Rank& rank) { size(rank, 0); });
  } else if (what == "error") {
    run_pair(error);
  } else if (what == "hang") {
    run_pair(hang);
  } else if (what == "version") {
    run_pair(version);
  } else if (what == "death_told") {
    return die(true);
  } else if (what == "death_silent") {
    return die(false);
  } else {
    std::fprintf(stderr, "usage: failures size_staged|size_not_staged|error|hang|version|death_told|death_silent\n");
    return 2;
  }
  return 0;
}
