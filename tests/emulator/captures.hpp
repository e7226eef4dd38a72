// Stream captures: as much of them as shows who breaks one. What is captured is forgotten; no graph ever runs.
//
// CUDA driver API, cuThreadExchangeStreamCaptureMode: calls that may be unsafe (queries, synchronizations,
// allocations) are prohibited for a thread that itself captures in another mode than relaxed, and for a thread in global
// mode, in which all start, while any other captures in global mode. A prohibited call fails with
// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900) and invalidates the capture, whose end then fails with 901.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "link/nccl/cuda_abi.hpp"

namespace pypipe::emulator {

struct Stream;
struct Event;

enum class CaptureMode : int { global = 0, thread = 1, relaxed = 2 };

struct Capture {
  CaptureMode mode = CaptureMode::global;
  std::thread::id thread;
  cuda::StreamHandle origin = nullptr;
  std::set<cuda::StreamHandle> streams;   // the origin, and what has joined
  std::set<cuda::StreamHandle> unjoined;  // what the origin has not waited for since
  bool invalid = false;
};

namespace capture_errors {
inline constexpr auto unsupported = static_cast<cuda::Result>(900);
inline constexpr auto invalidated = static_cast<cuda::Result>(901);
inline constexpr auto merge = static_cast<cuda::Result>(903);
inline constexpr auto unmatched = static_cast<cuda::Result>(902);
inline constexpr auto unjoined = static_cast<cuda::Result>(904);
inline constexpr auto isolation = static_cast<cuda::Result>(905);
inline constexpr auto captured_event = static_cast<cuda::Result>(907);
inline constexpr auto wrong_thread = static_cast<cuda::Result>(908);
}  // namespace capture_errors

class Captures {
 public:
  static CaptureMode exchange(CaptureMode mode);

  cuda::Result begin(Stream& stream, CaptureMode mode);
  cuda::Result end(Stream& stream);
  // Whether the calling thread may do what may be unsafe; if not, that is reported, and breaks the captures.
  bool allows();
  // The stream's wait for an event, as far as a capture has to do with it: then true, with what the call answers.
  bool waits(Stream& stream, Event& event, cuda::Result& answer);
  cuda::Result invalidate(Capture& capture, cuda::Result why, const std::string& what);

 private:
  std::vector<std::shared_ptr<Capture>> running_;
};

}  // namespace pypipe::emulator
