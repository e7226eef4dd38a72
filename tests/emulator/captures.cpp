#include "captures.hpp"

#include <algorithm>
#include <utility>

#include "streams.hpp"

namespace pypipe::emulator {
namespace {

thread_local CaptureMode thread_mode = CaptureMode::global;

}  // namespace

CaptureMode Captures::exchange(CaptureMode mode) { return std::exchange(thread_mode, mode); }

cuda::Result Captures::begin(Stream& stream, CaptureMode mode) {
  if (stream.capture) return invalidate(*stream.capture, capture_errors::unmatched, "a second beginning");
  stream.capture = std::make_shared<Capture>();
  stream.capture->mode = mode;
  stream.capture->thread = std::this_thread::get_id();
  stream.capture->origin = stream.handle;
  stream.capture->streams.insert(stream.handle);
  running_.push_back(stream.capture);
  return cuda::Result::success;
}

cuda::Result Captures::end(Stream& stream) {
  const std::shared_ptr<Capture> ended = stream.capture;
  if (!ended || ended->origin != stream.handle) return static_cast<cuda::Result>(401);  // CUDA_ERROR_ILLEGAL_STATE
  if (ended->mode != CaptureMode::relaxed && ended->thread != std::this_thread::get_id()) {
    return capture_errors::wrong_thread;
  }
  std::erase(running_, ended);
  engine().streams.leave_capture(*ended);
  if (ended->invalid) return capture_errors::invalidated;
  return ended->unjoined.empty() ? cuda::Result::success : capture_errors::unjoined;
}

bool Captures::allows() {
  if (thread_mode == CaptureMode::relaxed) return true;
  bool allowed = true;
  for (const auto& capture : running_) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool prohibits = own ? capture->mode != CaptureMode::relaxed
                               : capture->mode == CaptureMode::global && thread_mode == CaptureMode::global;
    if (!prohibits) continue;
    (void)invalidate(*capture, capture_errors::unsupported,
                     own ? "a call of the same thread" : "a call of another thread");
    allowed = false;
  }
  return allowed;
}

bool Captures::waits(Stream& stream, Event& event, cuda::Result& answer) {
  answer = cuda::Result::success;
  if (!event.capture) {
    if (!stream.capture) return false;
    if (event.latest)
      answer = invalidate(*stream.capture, capture_errors::isolation, "a wait for an event outside of it");
    return true;
  }
  Capture& capture = *event.capture;
  if (std::find(running_.begin(), running_.end(), event.capture) == running_.end()) {
    answer = capture_errors::captured_event;
    return true;
  }
  if (stream.capture && stream.capture != event.capture) {
    answer = invalidate(*stream.capture, capture_errors::merge, "a wait for an event of another capture");
    return true;
  }
  if (!stream.capture) {
    stream.capture = event.capture;
    capture.streams.insert(stream.handle);
    capture.unjoined.insert(stream.handle);
  } else if (event.captured_on != stream.handle) {
    capture.unjoined.erase(event.captured_on);
  }
  return true;
}

cuda::Result Captures::invalidate(Capture& capture, cuda::Result why, const std::string& what) {
  if (!capture.invalid) {
    engine().reports.hazard("capture", what + " breaks a stream capture: " + describe(Call::site()));
  }
  capture.invalid = true;
  return why;
}

}  // namespace pypipe::emulator
