// Hazards of memory: what reads or writes a buffer before, while or after an operation may.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "scenarios.hpp"

namespace pypipe::test {
namespace {

constexpr std::size_t bytes = 20000;
constexpr int messages = 6;

void expect_data(const DeviceMemory& memory, unsigned char value, bool planted) {
  check(planted || memory.is(value), "the message has wrong bytes");
}

// The receiving rank of most scenarios: it takes what comes, and looks at it only when it may.
void take(Rank& rank, int count, bool planted) {
  Stream wire("receive");
  const DeviceMemory slot(bytes);
  Communicator link(rank, "link");
  for (int i = 0; i < count; ++i) {
    link.receive(slot, wire);
    (void)link.settle();
    check(wire.finish(), "no message came");
    pypipe_emulator_reads(slot.data(), slot.bytes, nullptr, "check");
    expect_data(slot, static_cast<unsigned char>(i + 1), planted);
  }
}

}  // namespace

void no_wait_before_a_send(Rank& rank, bool planted) {
  if (rank.number == 1) return take(rank, messages, planted);
  Stream compute("compute");
  Stream wire("send");
  const DeviceMemory buffer(bytes);
  Communicator link(rank, "link");
  Event ready;
  Event sent;
  for (int i = 0; i < messages; ++i) {
    compute.wait(sent);
    compute.fill(buffer.data(), bytes, static_cast<unsigned char>(i + 1));
    ready.record(compute.handle);
    if (!planted || i != messages / 2) wire.wait(ready);
    link.send(buffer, wire);
    (void)link.settle();
    sent.record(wire.handle);
  }
  check(wire.finish() && compute.finish(), "it hangs");
}

void no_wait_after_a_receive(Rank& rank, bool planted) {
  Stream wire("wire");
  Stream compute("compute");
  const DeviceMemory memory(bytes);
  Communicator link(rank, "link");
  if (rank.number == 0) {
    compute.fill(memory.data(), bytes, 7);
    Event ready;
    ready.record(compute.handle);
    wire.wait(ready);
    link.send(memory, wire);
    (void)link.settle();
  } else {
    link.receive(memory, wire);
    (void)link.settle();
    Event arrived;
    arrived.record(wire.handle);
    if (!planted) compute.wait(arrived);
    compute.read(memory.data(), bytes, "2F0");
  }
  check(wire.finish() && compute.finish(), "it hangs");
}

// Two slots; the last reader of each is the second kernel. One event too early is the one after the first.
void a_slot_reused_one_event_too_early(Rank& rank, bool planted) {
  constexpr std::size_t slots = 2;
  Stream wire("wire");
  Stream compute("compute");
  if (rank.number == 0) {
    const DeviceMemory buffer(bytes);
    Communicator link(rank, "link");
    Event ready;
    Event sent;
    for (int i = 0; i < messages; ++i) {
      compute.wait(sent);
      compute.fill(buffer.data(), bytes, static_cast<unsigned char>(i + 1));
      ready.record(compute.handle);
      wire.wait(ready);
      link.send(buffer, wire);
      (void)link.settle();
      sent.record(wire.handle);
    }
    check(wire.finish() && compute.finish(), "it hangs");
    return;
  }
  const std::array<std::unique_ptr<DeviceMemory>, slots> memory{std::make_unique<DeviceMemory>(bytes),
                                                                std::make_unique<DeviceMemory>(bytes)};
  Communicator link(rank, "link");
  std::array<Event, slots> free;
  Event arrived;
  for (std::size_t i = 0; i < messages; ++i) {
    const DeviceMemory& slot = *memory.at(i % slots);
    wire.wait(free.at(i % slots));
    link.receive(slot, wire);
    (void)link.settle();
    arrived.record(wire.handle);
    compute.wait(arrived);
    compute.read(slot.data(), bytes, "forward");
    if (planted) free.at(i % slots).record(compute.handle);
    compute.read(slot.data(), bytes, "backward");
    if (!planted) free.at(i % slots).record(compute.handle);
  }
  check(wire.finish() && compute.finish(), "it hangs");
}

void a_freed_send_buffer(Rank& rank, bool planted) {
  if (rank.number == 1) return take(rank, 1, planted);
  Stream wire("send");
  DeviceMemory buffer(bytes);
  Communicator link(rank, "link");
  pypipe_emulator_writes(buffer.data(), bytes, nullptr, "compute");
  std::memset(buffer.data(), 1, bytes);
  link.send(buffer, wire);
  (void)link.settle();
  if (!planted) check(wire.finish(), "it hangs");
  buffer.free();
  check(wire.finish(), "it hangs");
}

// The same with memory that is not the emulator's, as a tensor's is, and really freed.
void a_freed_tensor(Rank& rank, bool planted) {
  if (rank.number == 1) return take(rank, 1, planted);
  Stream wire("send");
  Communicator link(rank, "link");
  auto tensor = std::make_unique<std::array<unsigned char, bytes>>();
  pypipe_emulator_allocated(tensor.get(), bytes);
  pypipe_emulator_writes(tensor.get(), bytes, nullptr, "compute");
  tensor->fill(1);
  pypipe_emulator_label("2SEND_F0");
  CALL(ncclSend(tensor.get(), bytes, nccl::uint8, 1, link.handle, wire.handle));
  pypipe_emulator_label(nullptr);
  (void)link.settle();
  if (!planted) check(wire.finish(), "it hangs");
  pypipe_emulator_freed(tensor.get(), bytes);
  tensor.reset();
  check(wire.finish(), "it hangs");
}

// Compute on the CPU is stream 0: it may write again only after stream 0 has waited for the send's event.
void host_writes_a_buffer_being_sent(Rank& rank, bool planted) {
  if (rank.number == 1) return take(rank, messages, planted);
  Stream wire("send");
  const DeviceMemory buffer(bytes);
  Communicator link(rank, "link");
  Event ready;
  Event sent;
  for (int i = 0; i < messages; ++i) {
    if (!planted || i != messages / 2) CALL(cuStreamWaitEvent(nullptr, sent.handle, 0));
    pypipe_emulator_writes(buffer.data(), bytes, nullptr, "1F0");
    std::memset(buffer.data(), i + 1, bytes);
    ready.record(nullptr);
    wire.wait(ready);
    link.send(buffer, wire);
    (void)link.settle();
    sent.record(wire.handle);
  }
  check(wire.finish(), "it hangs");
  check(pypipe_emulator_host_synchronizations() == 0, "a wait of stream 0 counts as a host synchronization");
}

// Rank 0 may write a buffer again once an answer to it has come back: the answer was sent after the message came,
// so the message has been read. Planted: it waits for the answer on another stream than the one that writes.
void an_order_through_the_peer(Rank& rank, bool planted) {
  Stream out("out");
  Stream back("back");
  Stream compute("compute");
  const DeviceMemory message(bytes);
  const DeviceMemory answer(bytes);
  Communicator there(rank, "there");
  Communicator here(rank, "here");
  Event came;
  if (rank.number == 0) {
    Event ready;
    compute.fill(message.data(), bytes, 1);
    ready.record(compute.handle);
    out.wait(ready);
    there.send(message, out);
    (void)there.settle();
    here.receive(answer, back);
    (void)here.settle();
    came.record(back.handle);
    if (!planted) compute.wait(came);
    compute.fill(message.data(), bytes, 2);
  } else {
    there.receive(message, out);
    (void)there.settle();
    came.record(out.handle);
    back.wait(came);
    here.send(message, back);
    (void)here.settle();
  }
  check(out.finish() && back.finish() && compute.finish(), "it hangs");
  if (rank.number == 0) expect_data(answer, 1, planted);
}

}  // namespace pypipe::test
