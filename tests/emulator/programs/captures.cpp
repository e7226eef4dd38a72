// captures WHAT: what breaks a stream capture, and what does not.
#include <cstdio>
#include <string>
#include <thread>

#include "choose.hpp"
#include "pair.hpp"

namespace pypipe::test {
namespace {

enum Mode { global = 0, of_a_thread = 1, relaxed = 2 };
constexpr auto unsupported = static_cast<cuda::Result>(900);

cuda::Result end(const Stream& stream) {
  void* graph = nullptr;
  const cuda::Result result = cuStreamEndCapture(stream.handle, &graph);
  check((graph != nullptr) == (result == cuda::Result::success), "a graph where none was captured, or reversed");
  return result;
}

void exchange(int mode, int before) {
  auto exchanged = static_cast<cuda::CaptureMode>(mode);
  CALL(cuThreadExchangeStreamCaptureMode(&exchanged));
  check(static_cast<int>(exchanged) == before, "the mode of the thread");
}

// A capture, while another thread in some mode asks for an event that has nothing to do with it.
void queries(Mode capture, Mode thread, bool breaks) {
  Stream stream("captured");
  Event event;
  CALL(cuStreamBeginCapture_v2(stream.handle, capture));
  std::thread([&] {
    use_device(0);
    exchange(thread, global);
    const cuda::Result asked = cuEventQuery(event.handle);
    check(asked == (breaks ? unsupported : cuda::Result::success), "the answer to a query during a capture");
  }).join();
  const cuda::Result ended = end(stream);
  check(ended == (breaks ? static_cast<cuda::Result>(901) : cuda::Result::success), "the end of a capture");
  if (breaks) expect_report("capture", "a call of another thread breaks a stream capture: cuEventQuery");
  check(hazards() == 0, "something legal was reported");
}

// The capturing thread itself.
void allocates(Mode capture, Mode thread, bool breaks) {
  Stream stream("captured");
  cuda::Pointer memory = 0;
  CALL(cuStreamBeginCapture_v2(stream.handle, capture));
  exchange(thread, global);
  check((cuMemAlloc_v2(&memory, 64) == unsupported) == breaks, "an allocation during a capture");
  exchange(global, thread);
  check((end(stream) != cuda::Result::success) == breaks, "the end of a capture");
  check(hazards("capture") == (breaks ? 1 : 0), "the reports");
  pypipe_emulator_reset_counters();
}

// Another stream joins by an event, and has to be waited for; what lies outside must not be.
void joins() {
  Stream stream("captured");
  Stream other("other");
  Event event;
  Event back;
  Event outside;
  outside.record(other.handle);
  CALL(cuStreamBeginCapture_v2(stream.handle, global));
  event.record(stream.handle);
  other.wait(event);
  back.record(other.handle);
  stream.wait(back);
  int status = 0;
  CALL(cuStreamIsCapturing(other.handle, &status));
  check(status == 1, "a stream that joined is not captured");
  check(end(stream) == cuda::Result::success, "a capture of two streams");
  check(cuEventQuery(event.handle) == static_cast<cuda::Result>(907), "a captured event was asked");
  event.record(stream.handle);
  check(stream.finish() && event.done(), "an event that was recorded again");

  CALL(cuStreamBeginCapture_v2(stream.handle, global));
  event.record(stream.handle);
  other.wait(event);
  check(end(stream) == static_cast<cuda::Result>(904), "a stream that was not joined again");

  CALL(cuStreamBeginCapture_v2(stream.handle, global));
  check(cuStreamWaitEvent(stream.handle, outside.handle, 0) == static_cast<cuda::Result>(905), "an event outside");
  check(end(stream) == static_cast<cuda::Result>(901), "the end of a broken capture");
  expect_report("capture", "an event outside of it");
}

}  // namespace
}  // namespace pypipe::test

int main(int argc, char** argv) {
  using namespace pypipe::test;
  return choose(argc, argv,
                {
                    {"queries",
                     [] {
                       queries(global, global, true);
                       queries(global, of_a_thread, false);
                       queries(global, relaxed, false);
                       queries(of_a_thread, global, false);
                       queries(relaxed, global, false);
                     }},
                    {"own",
                     [] {
                       allocates(global, global, true);
                       allocates(of_a_thread, of_a_thread, true);
                       allocates(relaxed, global, false);
                       allocates(global, relaxed, false);
                     }},
                    {"joins", joins},
                });
}
