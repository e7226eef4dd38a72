// What the emulator promises, one promise a section: events, stream 0, communicators, groups, staging, memory.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "choose.hpp"
#include "pair.hpp"

namespace pypipe::test {
namespace {

using std::chrono::milliseconds;

// A kernel that lasts until it is told to end.
class Gate {
 public:
  explicit Gate(const Stream& stream) {
    const auto run = [](void* gate) {
      while (!static_cast<std::atomic<bool>*>(gate)->load()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    };
    pypipe_emulator_launch(stream.handle, "gate", run, &open_, nullptr, 0);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

void events() {
  Stream one("one");
  Stream other("other");
  Event event;
  other.wait(event);
  check(other.finish(), "a wait for an event that was never recorded blocks");
  check(event.done(), "an event that was never recorded is not done");

  Gate first(one);
  event.record(one.handle);
  check(!event.done(), "an event is done before its stream is");
  other.wait(event);
  Event after;
  after.record(other.handle);
  {
    // Recorded again, on a stream that is free: who waits already still waits for the first record.
    Stream free("free");
    event.record(free.handle);
    check(free.finish() && event.done(), "an event that was recorded again is not done");
    std::this_thread::sleep_for(milliseconds(2));
    check(!after.done(), "a wait took a record that came after it");
  }
  first.open();
  check(other.finish() && after.done(), "a wait did not end");

  Gate second(one);
  {
    Event passing;
    passing.record(one.handle);
    other.wait(passing);
    after.record(other.handle);
  }
  std::this_thread::sleep_for(milliseconds(2));
  check(!after.done(), "a wait ended because its event was destroyed");
  second.open();
  check(other.finish(), "a wait for a destroyed event did not end");
  check(hazards() == 0, "something legal was reported");

  cuda::EventHandle gone = nullptr;
  CALL(cuEventCreate(&gone, 0));
  CALL(cuEventDestroy_v2(gone));
  check(cuEventRecord(gone, one.handle) != cuda::Result::success, "a destroyed event was recorded");
  expect_report("usage", "no such event");
}

void stream_zero() {
  Event event;
  event.record(nullptr);
  check(event.done(), "work of the host is not done when it is recorded");
  Stream stream("stream");
  Gate gate(stream);
  event.record(stream.handle);
  check(cuStreamQuery(nullptr) == cuda::Result::success, "the host is busy with itself");
  check(cuStreamQuery(stream.handle) == cuda::Result::not_ready, "a busy stream says that it is idle");
  std::atomic<bool> passed{false};
  std::thread waiter([&] {
    use_device(0);
    CALL(cuStreamWaitEvent(nullptr, event.handle, 0));
    passed = true;
  });
  std::this_thread::sleep_for(milliseconds(3));
  check(!passed, "stream 0 did not wait for the event");
  gate.open();
  waiter.join();
  check(pypipe_emulator_host_synchronizations() == 0, "a wait of stream 0 or a query was counted");
  CALL(cuStreamSynchronize(stream.handle));
  CALL(cuEventSynchronize(event.handle));
  check(pypipe_emulator_host_synchronizations() == 2, "synchronizations were not counted");
  const DeviceMemory from(64);
  const DeviceMemory to(64);
  std::memset(from.data(), 3, 64);
  const auto source = reinterpret_cast<std::uintptr_t>(from.data());
  const auto target = reinterpret_cast<std::uintptr_t>(to.data());
  CALL(cuMemcpyAsync(target, source, 64, nullptr));
  check(to.is(3), "a copy on stream 0 is not immediate");
  std::memset(from.data(), 4, 64);
  CALL(cuMemcpyAsync(target, source, 64, stream.handle));
  check(stream.finish() && to.is(4), "a copy did not happen");
  pypipe_emulator_reset_counters();
}

// With the knob, stream 0 is a queue: nothing on it holds up the host, and nothing has happened before it says so.
void queued_zero() {
  check(pypipe_emulator_set("default_stream", "queue") == 0, "no such knob");
  Stream stream("stream");
  Event event;
  Event after;
  Gate gate(stream);
  event.record(stream.handle);
  CALL(cuStreamWaitEvent(nullptr, event.handle, 0));
  const DeviceMemory from(64);
  const DeviceMemory to(64);
  std::memset(from.data(), 3, 64);
  CALL(cuMemcpyAsync(reinterpret_cast<std::uintptr_t>(to.data()), reinterpret_cast<std::uintptr_t>(from.data()), 64,
                     nullptr));
  pypipe_emulator_writes(to.data(), 1, nullptr, "forward");
  after.record(nullptr);
  std::this_thread::sleep_for(milliseconds(2));
  check(!after.done() && !to.is(3), "stream 0 did not wait for the event");
  check(cuStreamQuery(nullptr) == cuda::Result::not_ready, "stream 0 is idle");
  check(hazards() == 0, "something legal was reported");
  stream.read(to.data(), 64, "too early");
  gate.open();
  CALL(cuStreamSynchronize(nullptr));
  check(after.done() && to.is(3), "stream 0 did not copy");
  check(stream.finish() && hazards("race") != 0, "compute on stream 0 is ordered by the host");
  pypipe_emulator_reset_counters();
}

void memory() {
  {
    DeviceMemory fresh(100);
    check(fresh.is(0xfb), "new memory is not poisoned");
    const std::byte* data = fresh.data();
    fresh.free();
    check(*data == std::byte{0xfb}, "freed memory is not poisoned");
    pypipe_emulator_reset_counters();
    Stream stream("stream");
    stream.read(data, 10, "late");
    check(stream.finish(), "it hangs");
    expect_report("freed", "use after free: read by late");
  }
  {
    const DeviceMemory small(100);
    Stream stream("stream");
    stream.read(small.data() + 50, 51, "too long");
    check(stream.finish(), "it hangs");
    expect_report("bounds", "leaves its allocation of 100 bytes");
  }
  {
    DeviceMemory small(100);
    small.data()[100] = std::byte{1};
    small.free();
    expect_report("bounds", "bytes around an allocation of 100 bytes were overwritten");
  }
  {
    // Thousands of buffers that come and go: the checker forgets what is ordered before everything.
    Stream stream("stream");
    Event event;
    const DeviceMemory arena(1U << 20U);
    for (std::size_t i = 0; i < 20000; ++i) {
      stream.read(arena.data() + (i * 7919) % (arena.bytes - 16), 8);
      if (i % 64 != 0) continue;
      event.record(stream.handle);
      CALL(cuStreamWaitEvent(nullptr, event.handle, 0));
    }
    check(stream.finish(), "it hangs");
    check(pypipe_emulator_checker_nodes() < 10000, "the checker forgets nothing");
  }
  check(hazards() == 0, "something legal was reported");
  pypipe_emulator_reset_counters();
}

nccl::Result create(const nccl::Config* config, int size = 1) {
  nccl::UniqueId id{};
  CALL(ncclGetUniqueId(&id));
  nccl::CommunicatorHandle handle = nullptr;
  nccl::Config copy = config == nullptr ? nccl::Config{} : *config;
  const nccl::Result result = ncclCommInitRankConfig(&handle, size, id, 0, config == nullptr ? nullptr : &copy);
  if (handle != nullptr) CALL(ncclCommAbort(handle));
  return result;
}

void configurations() {
  check(create(nullptr) == nccl::Result::success, "a blocking communicator of one rank");
  nccl::Config config;
  config.version = 23007;
  config.blocking = 0;
  check(create(&config, 2) == nccl::Result::in_progress, "a non-blocking creation blocks");
  check(hazards() == 0, "something legal was reported");
  const auto refused = [&](const nccl::Config& wrong, const char* why) {
    check(create(&wrong) == nccl::Result::invalid_argument, std::string("accepted: ") + why);
    expect_report("usage", why);
  };
  nccl::Config wrong = config;
  wrong.magic = 1;
  refused(wrong, "magic number");
  wrong = config;
  wrong.size = 4;
  refused(wrong, "size is 4");
  wrong = config;
  wrong.version = 0;
  refused(wrong, "version is 0");
  wrong = config;
  wrong.blocking = 2;
  refused(wrong, "blocking is 2");
  wrong = config;
  wrong.min_ctas = 4;
  wrong.max_ctas = 2;
  refused(wrong, "min_ctas is above max_ctas");
}

// A rank of its own: send and receive in one group.
void to_oneself() {
  Stream stream("stream");
  nccl::UniqueId id{};
  CALL(ncclGetUniqueId(&id));
  nccl::CommunicatorHandle self = nullptr;
  nccl::Config config;
  config.version = 23007;
  CALL(ncclCommInitRankConfig(&self, 1, id, 0, &config));
  const DeviceMemory from(1000);
  const DeviceMemory to(1000);
  std::memset(from.data(), 9, 1000);
  group_start();
  CALL(ncclSend(from.data(), 250, 3, 0, self, stream.handle));  // as 250 x uint32
  CALL(ncclRecv(to.data(), 1000, nccl::uint8, 0, self, stream.handle));
  group_end({});
  check(stream.finish() && to.is(9), "a message to oneself did not arrive");
  check(hazards() == 0, "something legal was reported");
  check(ncclSend(from.data(), 1, nccl::uint8, 0, self, stream.handle) == nccl::Result::invalid_usage,
        "a send to oneself without its receive");
  expect_report("usage", "without its receive in the group");
  void* registration = nullptr;
  CALL(ncclCommRegister(self, to.data(), to.bytes, &registration));
  CALL(ncclCommDestroy(self));
  expect_report("registered", "1 buffers still registered");
  check(ncclSend(from.data(), 1, nccl::uint8, 0, self, stream.handle) == nccl::Result::invalid_argument,
        "a destroyed communicator was used");
  expect_report("usage", "no such communicator");
}

// Sends complete early while the budget lasts, and not after; a group completes as a whole.
void staging(Rank& rank) {
  knob("staging", 10000);
  Stream wire("wire");
  const DeviceMemory memory(6000);
  Communicator link(rank, "link");
  link.warm_up(wire);
  rank.barrier();
  if (rank.number == 0) {
    Event first;
    Event second;
    std::memset(memory.data(), 1, memory.bytes);
    link.send(memory, wire);
    (void)link.settle();
    first.record(wire.handle);
    link.send(memory, wire);
    (void)link.settle();
    second.record(wire.handle);
    while (!first.done()) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(3));
    check(!second.done(), "a send completed without room in the staging");
    rank.barrier();
    check(wire.finish(), "it hangs");
  } else {
    rank.barrier();
    const DeviceMemory other(6000);
    group_start();
    link.receive(memory, wire);
    link.receive(other, wire);
    group_end({&link});
    check(wire.finish() && memory.is(1) && other.is(1), "a group of receives did not complete");
  }
  check(hazards() == 0, "something legal was reported");
  knob("staging", 65536);
}

// A call on a communicator that is in progress is a mistake; what must be possible is an abort.
void misuse(Rank& rank) {
  Stream wire("wire");
  const DeviceMemory memory(100);
  Communicator link(rank, "link");
  if (rank.number == 0) {
    link.send(memory, wire);  // the first use: in progress until the peer comes
    check(ncclSend(memory.data(), 1, nccl::uint8, 1, link.handle, wire.handle) == nccl::Result::invalid_argument,
          "a communicator in progress was used");
    expect_report("usage", "before its previous call has finished");
    link.abort();
    check(wire.finish(), "an aborted call left something in the stream");
  }
  rank.barrier();
  if (rank.number == 1) link.abort();
  check(hazards() == 0, "something legal was reported");
}

// A blocking communicator blocks the host at the first use of an edge, until the peer uses it too.
void blocking(Rank& rank) {
  Stream wire("wire");
  const DeviceMemory memory(100);
  Communicator link(rank, "link", true);
  const auto start = std::chrono::steady_clock::now();
  if (rank.number == 0) {
    std::memset(memory.data(), 5, 100);
    link.send(memory, wire);
    check(std::chrono::steady_clock::now() - start > milliseconds(5), "the first use did not wait for the peer's");
  } else {
    std::this_thread::sleep_for(milliseconds(20));
    link.receive(memory, wire);
  }
  check(wire.finish() && memory.is(5), "the message did not arrive");
  check(hazards() == 0, "something legal was reported");
}

void together() {
  run_pair([](Rank& rank) {
    staging(rank);
    misuse(rank);
    blocking(rank);
  });
}

}  // namespace
}  // namespace pypipe::test

int main(int argc, char** argv) {
  using namespace pypipe::test;
  return choose(argc, argv,
                {
                    {"events", events},
                    {"stream_zero", stream_zero},
                    {"queued_zero", queued_zero},
                    {"memory", memory},
                    {"configurations", configurations},
                    {"to_oneself", to_oneself},
                    {"together", together},
                });
}
