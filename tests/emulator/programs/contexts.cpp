// contexts WHAT: the current context of a thread, and the devices of a process.
#include <cstdio>
#include <string>
#include <thread>

#include "choose.hpp"
#include "pair.hpp"

namespace pypipe::test {
namespace {

constexpr auto invalid_context = static_cast<cuda::Result>(201);

void expect_no_context(cuda::Result result) {
  check(result == invalid_context, "a call without a current context");
  expect_report("context", "no current context");
}

// What a thread without a current context can't do.
void nothing_goes(const Stream& stream, const Event& event, cuda::Pointer memory) {
  cuda::Context current = nullptr;
  CALL(cuCtxGetCurrent(&current));
  check(current == nullptr, "a thread starts with a context");
  cuda::StreamHandle made = nullptr;
  cuda::EventHandle recorded = nullptr;
  cuda::Pointer allocated = 0;
  expect_no_context(cuStreamCreateWithPriority(&made, 1, 0));
  expect_no_context(cuEventCreate(&recorded, 0));
  expect_no_context(cuEventRecord(event.handle, stream.handle));
  expect_no_context(cuEventQuery(event.handle));
  expect_no_context(cuStreamWaitEvent(stream.handle, event.handle, 0));
  expect_no_context(cuStreamQuery(stream.handle));
  expect_no_context(cuStreamSynchronize(stream.handle));
  expect_no_context(cuMemAlloc_v2(&allocated, 64));
  expect_no_context(cuMemcpyAsync(memory, memory + 32, 32, stream.handle));
  expect_no_context(cuMemFree_v2(memory));
  expect_no_context(cuCtxSynchronize());
}

void threads() {
  const DeviceMemory memory(64);
  Stream stream("stream");
  Event event;
  const auto pointer = reinterpret_cast<std::uintptr_t>(memory.data());
  std::thread([&] {
    nothing_goes(stream, event, pointer);
    use_device(0);
    event.record(stream.handle);
    CALL(cuCtxSetCurrent(nullptr));
    expect_no_context(cuEventQuery(event.handle));
  }).join();
  event.record(stream.handle);
  check(stream.finish() && hazards() == 0, "the first thread has no context");
  CALL(cuDevicePrimaryCtxRelease_v2(0));
  check(cuDevicePrimaryCtxRelease_v2(0) == invalid_context, "a context was released too often");
  expect_report("context", "more often than retained");
}

// As a program that has never made a context current.
void none() {
  check(pypipe_emulator_set("context", "none") == 0, "no such knob");
  cuda::EventHandle event = nullptr;
  expect_no_context(cuEventCreate(&event, 0));
  use_device(0);
  CALL(cuEventCreate(&event, 0));
  check(hazards() == 0, "something legal was reported");
}

void devices() {
  knob("devices", 2);
  knob("multiprocessors", 78);
  int count = 0;
  CALL(cuDeviceGetCount(&count));
  check(count == 2, "the number of devices");
  CALL(cuDeviceGetAttribute(&count, 16, 1));
  check(count == 78, "the number of multiprocessors");
  Stream here("here");
  const DeviceMemory memory(64);
  nccl::UniqueId id{};
  CALL(ncclGetUniqueId(&id));
  nccl::CommunicatorHandle self = nullptr;
  use_device(1);
  CALL(ncclCommInitRankConfig(&self, 1, id, 0, nullptr));
  Stream there("there");
  Event event;
  const DeviceMemory other(64);
  event.record(there.handle);
  here.wait(event);  // this may be across devices
  check(cuEventRecord(event.handle, here.handle) == static_cast<cuda::Result>(400), "recorded across devices");
  expect_report("context", "an event of device 1 is recorded on stream");
  const auto send = [&](const DeviceMemory& from, const Stream& on) {
    const nccl::Result result = ncclSend(from.data(), 64, nccl::uint8, 0, self, on.handle);
    check(result == nccl::Result::unhandled_cuda_error, "sent across devices");
  };
  send(other, here);
  expect_report("context", "is on device 0, and communicator");
  send(memory, there);
  expect_report("context", "memory of device 0");
  pypipe_emulator_launch(here.handle, "kernel", nullptr, nullptr, nullptr, 0);
  expect_report("context", "which is not the current one");
  use_device(0);
  check(here.finish(), "it hangs");
  use_device(1);
  CALL(ncclCommDestroy(self));
  check(hazards() == 0, "something legal was reported");
}

}  // namespace
}  // namespace pypipe::test

int main(int argc, char** argv) {
  using namespace pypipe::test;
  return choose(argc, argv,
                {
                    {"threads", threads},
                    {"none", none},
                    {"devices", devices},
                });
}
