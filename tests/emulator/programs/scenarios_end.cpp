// Hazards of the end: what an abort, a free or a deregistration waits for.
#include <chrono>
#include <string>
#include <thread>

#include "scenarios.hpp"

namespace pypipe::test {
namespace {

constexpr std::size_t size = 4096;

// Two links of a rank, as in the steady state of a pipeline: what one sends waits for what the other receives, and that
// never comes.
struct Stuck {
  explicit Stuck(const Rank& rank) : in("in"), out("out"), memory(size), from(rank, "from"), to(rank, "to") {
    from.warm_up(in);
    to.warm_up(out);
    rank.barrier();
    from.receive(memory, in);
    (void)from.settle();
    came.record(in.handle);
    out.wait(came);
    to.send(memory, out);
    (void)to.settle();
    check(!came.done(), "a receive without its send is done");
  }
  // One of them waits for the other, which nobody has told yet: until somebody does, on another thread.
  void rescue() {
    while (hazards("hang") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    from.abort();
  }
  Stream in;
  Stream out;
  DeviceMemory memory;
  Communicator from;
  Communicator to;
  Event came;
};

}  // namespace

void aborts_one_by_one(Rank& rank, bool planted) {
  knob("hang_ms", planted ? 600 : 60000);
  Stuck stuck(rank);
  if (planted) {
    std::thread rescuer([&] { stuck.rescue(); });
    stuck.to.abort();
    rescuer.join();
  } else {
    abort_all({&stuck.to, &stuck.from});
  }
  check(planted || (stuck.in.finish() && stuck.out.finish()), "something is left in a stream");
  rank.barrier();
}

// Before 2.22 a group does not help: each needs a thread of its own.
void aborts_of_an_old_release(Rank& rank, bool planted) {
  knob("hang_ms", planted ? 600 : 60000);
  knob("version", 21805);
  Stuck stuck(rank);
  std::thread other([&] {
    if (planted) {
      stuck.rescue();
    } else {
      stuck.from.abort();
    }
  });
  if (planted) group_start();
  stuck.to.abort();
  if (planted) CALL(ncclGroupEnd());
  other.join();
  check(planted || (stuck.in.finish() && stuck.out.finish()), "something is left in a stream");
  rank.barrier();
}

namespace {

// A message whose memory is registered at the receiver's end, and at the sender's.
void registered(Rank& rank, bool at_both_ends, bool waits) {
  Stream wire("wire");
  const DeviceMemory memory(size);
  Communicator link(rank, "link");
  const bool enrolls = at_both_ends || rank.number == 1;
  void* registration = nullptr;
  if (enrolls) CALL(ncclCommRegister(link.handle, memory.data(), memory.bytes, &registration));
  if (rank.number == 0) {
    link.send(memory, wire);
  } else {
    link.receive(memory, wire);
  }
  (void)link.settle();
  if (waits) check(wire.finish(), "it hangs");
  if (!waits) pypipe_emulator_settle(wire.handle);  // it has ended, but nothing says so
  if (enrolls) CALL(ncclCommDeregister(link.handle, registration));
  check(wire.finish(), "it hangs");
}

}  // namespace

namespace {

// Rank 1 has posted a receive, and does something that waits for the device before rank 0 may send.
void behind_a_receive(Rank& rank, bool planted, void (*waits_for_the_device)(Stream&)) {
  knob("hang_ms", planted ? 600 : 60000);
  Stream wire("wire");
  Stream compute("compute");
  const DeviceMemory memory(size);
  Communicator link(rank, "link");
  link.warm_up(wire);
  const auto told = [&] {
    char token = 0;
    rank.number == 0 ? rank.get(&token, 1) : rank.put(&token, 1);
  };
  if (rank.number == 0) {
    told();
    link.send(memory, wire);
    (void)link.settle();
  } else {
    link.receive(memory, wire);
    (void)link.settle();
    std::thread rescuer([&] {
      if (!planted) return;
      while (hazards("hang") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      told();
    });
    if (planted) waits_for_the_device(compute);
    rescuer.join();
    if (!planted) told();
    if (!planted) check(wire.finish(), "it hangs");
    if (!planted) waits_for_the_device(compute);
  }
  pypipe_emulator_settle(wire.handle);
}

}  // namespace

void a_free_behind_a_receive(Rank& rank, bool planted) {
  behind_a_receive(rank, planted, [](Stream&) { DeviceMemory(16).free(); });
}

void a_first_launch_behind_a_receive(Rank& rank, bool planted) {
  knob("lazy_loading", 1);
  behind_a_receive(rank, planted, [](Stream& compute) {
    static int kinds = 0;
    const std::string kind = "kernel " + std::to_string(++kinds);
    pypipe_emulator_launch(compute.handle, kind.c_str(), nullptr, nullptr, nullptr, 0);
  });
}

void registered_at_one_end(Rank& rank, bool planted) { registered(rank, !planted, true); }

void deregistered_in_use(Rank& rank, bool planted) { registered(rank, true, !planted); }

}  // namespace pypipe::test
