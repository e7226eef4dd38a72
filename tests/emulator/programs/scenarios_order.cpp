// Hazards of order and progress: transfers that wait for each other, and events that come too early.
#include <array>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "scenarios.hpp"

namespace pypipe::test {
namespace {

constexpr std::size_t staging = 65536;
constexpr std::size_t large = 2 * staging;
constexpr std::size_t small = 4096;

// A planted hang must be reported soon, and a slow machine never be taken for one.
void set_limits(bool planted, std::size_t bytes = staging) {
  knob("staging", bytes);
  knob("hang_ms", planted ? 600 : 60000);
}

// Waits for the streams; if the planted hang was reported, aborts: once the peer has reported too, which would
// otherwise see the end of this rank, and other waits than those that were planted.
void finish(Rank& rank, bool planted, const std::vector<Stream*>& streams,
            const std::vector<Communicator*>& communicators) {
  bool done = true;
  for (Stream* stream : streams) done = done && stream->finish();
  if (!planted) check(done, "the correct order hangs");
  rank.barrier();
  if (done) return;
  abort_all(communicators);
}

// Both ranks send first; the correct twin of rank 1 receives first.
void cross(Rank& rank, bool crossed, std::size_t bytes, bool planted) {
  Stream wire("wire");
  const DeviceMemory out(bytes);
  const DeviceMemory in(bytes);
  Communicator link(rank, "both ways");
  link.warm_up(wire);
  if (rank.number == 0 || crossed) {
    link.send(out, wire);
    (void)link.settle();
    link.receive(in, wire);
  } else {
    link.receive(in, wire);
    (void)link.settle();
    link.send(out, wire);
  }
  (void)link.settle();
  finish(rank, planted, {&wire}, {&link});
}

}  // namespace

void crossed_order_above_the_staging(Rank& rank, bool planted) {
  set_limits(planted);
  cross(rank, planted, large, planted);
}

// The same bug does not show with a small message: hence the tests with large ones, or without staging.
void crossed_order_below_the_staging(Rank& rank, bool planted) {
  set_limits(planted, planted ? 0 : staging);
  cross(rank, true, small, planted);
}

// Each rank sends on one stream and receives on another, and issues the two in an order of its own. One
// communicator runs them in the order of issue whatever the streams; two communicators don't.
void opposite_transfers_one_communicator(Rank& rank, bool planted) {
  set_limits(planted);
  Stream forward("forward");
  Stream backward("backward");
  const DeviceMemory out(large);
  const DeviceMemory in(large);
  Communicator one(rank, "F");
  Communicator other(rank, "B");
  one.warm_up(forward);
  other.warm_up(backward);
  Communicator& back = planted ? one : other;
  if (rank.number == 0) {
    one.send(out, forward);
    (void)one.settle();
    back.receive(in, backward);
    (void)back.settle();
  } else {
    back.send(out, backward);
    (void)back.settle();
    one.receive(in, forward);
    (void)one.settle();
  }
  finish(rank, planted, {&forward, &backward}, {&one, &other});
}

// The remedy on one communicator: opposite transfers in one group.
void opposite_transfers_fused(Rank& rank, bool planted) {
  set_limits(planted);
  Stream wire("wire");
  const DeviceMemory out(large);
  const DeviceMemory in(large);
  Communicator link(rank, "both ways");
  link.warm_up(wire);
  if (!planted) group_start();
  if (rank.number == 0) {
    link.send(out, wire);
    if (planted) (void)link.settle();
    link.receive(in, wire);
  } else {
    if (planted) {
      link.send(out, wire);
      (void)link.settle();
      link.receive(in, wire);
    } else {
      link.receive(in, wire);
      link.send(out, wire);
    }
  }
  if (!planted) group_end({&link});
  (void)link.settle();
  finish(rank, planted, {&wire}, {&link});
}

// A receive that was posted early spins on the device. Where only one operation has room, no send can start.
void one_resident_operation(Rank& rank, bool planted) {
  set_limits(planted);
  knob("resident", 2);
  Stream sending("sending");
  Stream receiving("receiving");
  const DeviceMemory out(small);
  const DeviceMemory in(small);
  Communicator up(rank, "0 to 1");
  Communicator down(rank, "1 to 0");
  up.warm_up(sending);
  down.warm_up(receiving);
  rank.barrier();
  knob("resident", planted ? 1 : 2);
  Communicator& to = rank.number == 0 ? up : down;
  Communicator& from = rank.number == 0 ? down : up;
  from.receive(in, receiving);
  (void)from.settle();
  std::this_thread::sleep_for(std::chrono::milliseconds(planted ? 30 : 1));
  rank.barrier();  // both receives are resident
  to.send(out, sending);
  (void)to.settle();
  finish(rank, planted, {&sending, &receiving}, {&up, &down});
}

// CUDA_DEVICE_MAX_CONNECTIONS=1: a wait for a receive's event stands before the send in the only queue.
void one_hardware_queue(Rank& rank, bool planted) {
  set_limits(planted);
  Stream sending("sending");
  Stream receiving("receiving");
  Stream compute("compute");
  const DeviceMemory out(small);
  const DeviceMemory in(small);
  Communicator up(rank, "0 to 1");
  Communicator down(rank, "1 to 0");
  up.warm_up(sending);
  down.warm_up(receiving);
  for (Stream* stream : {&sending, &receiving, &compute}) check(stream->finish(), "it hangs");
  rank.barrier();
  knob("connections", planted ? 1 : 8);
  Communicator& to = rank.number == 0 ? up : down;
  Communicator& from = rank.number == 0 ? down : up;
  Event arrived;
  from.receive(in, receiving);
  (void)from.settle();
  arrived.record(receiving.handle);
  compute.wait(arrived);
  to.send(out, sending);
  (void)to.settle();
  finish(rank, planted, {&sending, &receiving, &compute}, {&up, &down});
  knob("connections", 0);
}

// With NCCL_LAUNCH_ORDER_IMPLICIT, kernels start in the order of issue. Rank 0 answers (up) what it is asked (down),
// and asks something itself (early), on which the question to it depends: issued after the answer, it never starts.
void a_launch_order_that_contradicts_the_data(Rank& rank, bool planted) {
  set_limits(planted);
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  Stream first("down");
  Stream second("up");
  Stream third("early");
  const DeviceMemory question(small);
  const DeviceMemory answer(small);
  const DeviceMemory other(small);
  Communicator down(rank, "down");
  Communicator up(rank, "up");
  Communicator early(rank, "early");
  down.warm_up(first);
  up.warm_up(second);
  early.warm_up(third);
  rank.barrier();
  Event came;
  if (rank.number == 0) {
    down.receive(question, first);
    (void)down.settle();
    came.record(first.handle);
    second.wait(came);
    if (!planted) early.send(other, third);
    (void)early.settle();
    up.send(answer, second);
    (void)up.settle();
    if (planted) early.send(other, third);
    (void)early.settle();
  } else {
    early.receive(other, third);
    (void)early.settle();
    came.record(third.handle);
    first.wait(came);
    down.send(question, first);
    (void)down.settle();
    up.receive(answer, second);
    (void)up.settle();
  }
  finish(rank, planted, {&first, &second, &third}, {&down, &up, &early});
  ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
}

// Below CUDA 12.3 each of those kernels even waits for the end of the one before: no receive can be posted early.
void a_serial_launch_order(Rank& rank, bool planted) {
  set_limits(planted);
  knob("driver", planted ? 12020 : 12030);
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  Stream sending("sending");
  Stream receiving("receiving");
  const DeviceMemory out(small);
  const DeviceMemory in(small);
  Communicator up(rank, "0 to 1");
  Communicator down(rank, "1 to 0");
  up.warm_up(sending);
  down.warm_up(receiving);
  Communicator& to = rank.number == 0 ? up : down;
  Communicator& from = rank.number == 0 ? down : up;
  from.receive(in, receiving);
  (void)from.settle();
  to.send(out, sending);
  (void)to.settle();
  finish(rank, planted, {&sending, &receiving}, {&up, &down});
  ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  knob("driver", 13000);
}

// The first use of an edge waits for the peer's: two ranks that connect two communicators in different orders.
void connections_in_different_orders(Rank& rank, bool planted) {
  set_limits(planted);
  Stream wire("wire");
  const DeviceMemory memory(small);
  Communicator one(rank, "one");
  Communicator other(rank, "other");
  Communicator& first = planted && rank.number == 1 ? other : one;
  Communicator& second = planted && rank.number == 1 ? one : other;
  for (Communicator* link : {&first, &second}) {
    if (rank.number == 0) {
      link->send(memory, wire);
    } else {
      link->receive(memory, wire);
    }
    if (link->settle() == nccl::Result::success) continue;
    check(planted, "the connections hang");
    rank.barrier();
    one.abort();
    other.abort();
    return;
  }
  finish(rank, planted, {&wire}, {&one, &other});
}

// A blocking creation waits for the other rank: two ranks that create two communicators in different orders, one by one
// or within a group. A second thread ends what hangs.
void creations_in_different_orders(Rank& rank, bool planted) {
  set_limits(planted);
  const nccl::UniqueId id = shared_id(rank);
  const nccl::UniqueId other = shared_id(rank);
  std::array<nccl::CommunicatorHandle, 2> made{};
  nccl::Config config;
  config.version = 23007;
  std::thread watchdog([&] {
    if (!planted) return;
    while (hazards("hang") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CALL(ncclCommAbort(made[0]));
  });
  if (!planted) group_start();
  for (std::size_t i = 0; i < made.size(); ++i) {
    const bool first = (i == 0) == (rank.number == 0);
    const nccl::Result result = ncclCommInitRankConfig(&made.at(i), 2, first ? id : other, rank.number, &config);
    check((result == nccl::Result::success) == !planted, "a creation that should hang, or should not");
    if (planted) break;
  }
  if (!planted) CALL(ncclGroupEnd());
  watchdog.join();
  if (planted) return rank.barrier();
  group_start();
  for (const nccl::CommunicatorHandle handle : made) CALL(ncclCommFinalize(handle));
  CALL(ncclGroupEnd());
  for (const nccl::CommunicatorHandle handle : made) CALL(ncclCommDestroy(handle));
}

// A non-blocking call that has not finished has put nothing into the stream yet: the event comes too early.
void an_event_recorded_in_progress(Rank& rank, bool planted) {
  Stream wire("wire");
  const DeviceMemory memory(small);
  Communicator link(rank, "link");
  if (rank.number == 0) {
    link.send(memory, wire);
  } else {
    link.receive(memory, wire);
  }
  Event done;
  if (planted) done.record(wire.handle);
  (void)link.settle();
  if (!planted) done.record(wire.handle);
  check(wire.finish(), "it hangs");
}

}  // namespace pypipe::test
