// libcuda.so.1: every function locks the engine and hands over.
#include <cstring>
#include <utility>

#include "abi.hpp"
#include "enter.hpp"
#include "streams.hpp"

using namespace pypipe;
using namespace pypipe::emulator;

namespace {

// CUresult, where cuda_abi.hpp does not name it.
constexpr auto invalid_value = static_cast<cuda::Result>(1);
constexpr auto out_of_memory = static_cast<cuda::Result>(2);
constexpr auto invalid_device = static_cast<cuda::Result>(101);
constexpr auto invalid_handle = static_cast<cuda::Result>(400);

constexpr auto invalid_context = static_cast<cuda::Result>(201);

// As PYPIPE_EMULATOR_ENTER, of what needs a current context.
#define PYPIPE_EMULATOR_ENTER_CONTEXT() \
  PYPIPE_EMULATOR_ENTER();              \
  if (!Contexts::checked()) return invalid_context

// The same of what may be unsafe during a capture.
#define PYPIPE_EMULATOR_ENTER_UNSAFE() \
  PYPIPE_EMULATOR_ENTER_CONTEXT();     \
  if (!engine().captures.allows()) return capture_errors::unsupported

bool is_device(cuda::Device device) {
  return device >= 0 && device < static_cast<cuda::Device>(engine().knobs.devices);
}

Device& device_at(cuda::Device device) { return engine().contexts.devices.at(static_cast<std::size_t>(device)); }

void* memory_at(cuda::Pointer pointer) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(pointer)); }

cuda::Result text_of(cuda::Result result, const char** text, bool name) {
  if (text == nullptr) return invalid_value;
  switch (static_cast<int>(result)) {
    case 0:
      *text = name ? "CUDA_SUCCESS" : "no error";
      return cuda::Result::success;
    case 1:
      *text = name ? "CUDA_ERROR_INVALID_VALUE" : "invalid argument";
      return cuda::Result::success;
    case 2:
      *text = name ? "CUDA_ERROR_OUT_OF_MEMORY" : "out of memory";
      return cuda::Result::success;
    case 101:
      *text = name ? "CUDA_ERROR_INVALID_DEVICE" : "invalid device ordinal";
      return cuda::Result::success;
    case 201:
      *text = name ? "CUDA_ERROR_INVALID_CONTEXT" : "invalid device context";
      return cuda::Result::success;
    case 400:
      *text = name ? "CUDA_ERROR_INVALID_HANDLE" : "invalid resource handle";
      return cuda::Result::success;
    case 600:
      *text = name ? "CUDA_ERROR_NOT_READY" : "device not ready";
      return cuda::Result::success;
    default:
      *text = nullptr;
      return invalid_value;
  }
}

}  // namespace

extern "C" {

cuda::Result cuInit(unsigned flags) { return flags == 0 ? cuda::Result::success : invalid_value; }

cuda::Result cuDriverGetVersion(int* version) {
  if (version == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
  *version = engine().knobs.driver;
  return cuda::Result::success;
}

cuda::Result cuGetErrorName(cuda::Result result, const char** text) { return text_of(result, text, true); }

cuda::Result cuGetErrorString(cuda::Result result, const char** text) { return text_of(result, text, false); }

cuda::Result cuDeviceGetCount(int* count) {
  if (count == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
  *count = static_cast<int>(engine().knobs.devices);
  return cuda::Result::success;
}

cuda::Result cuDeviceGet(cuda::Device* device, int ordinal) {
  PYPIPE_EMULATOR_ENTER();
  if (device == nullptr || !is_device(ordinal)) return invalid_device;
  *device = ordinal;
  return cuda::Result::success;
}

cuda::Result cuDeviceGetName(char* name, int bytes, cuda::Device device) {
  PYPIPE_EMULATOR_ENTER();
  if (name == nullptr || bytes <= 0 || !is_device(device)) return invalid_value;
  constexpr const char* text = "pypipe emulator (CPU)";
  std::strncpy(name, text, static_cast<std::size_t>(bytes) - 1);
  name[bytes - 1] = 0;
  return cuda::Result::success;
}

cuda::Result cuDeviceGetAttribute(int* value, int attribute, cuda::Device device) {
  PYPIPE_EMULATOR_ENTER();
  if (value == nullptr || attribute != cuda::attribute_multiprocessor_count) return invalid_value;
  if (!is_device(device)) return invalid_device;
  *value = static_cast<int>(engine().knobs.multiprocessors);
  return cuda::Result::success;
}

cuda::Result cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  PYPIPE_EMULATOR_ENTER();
  if (context == nullptr || !is_device(device)) return invalid_value;
  ++device_at(device).retained;
  *context = Contexts::primary(device);
  return cuda::Result::success;
}

cuda::Result cuDevicePrimaryCtxRelease_v2(cuda::Device device) {
  PYPIPE_EMULATOR_ENTER();
  if (!is_device(device)) return invalid_device;
  if (device_at(device).retained == 0) {
    engine().reports.hazard("context",
                            "a primary context is released more often than retained: " + describe(Call::site()));
    return invalid_context;
  }
  --device_at(device).retained;
  return cuda::Result::success;
}

cuda::Result cuCtxGetCurrent(cuda::Context* context) {
  if (context == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
  *context = Contexts::current();
  return cuda::Result::success;
}

cuda::Result cuCtxSetCurrent(cuda::Context context) {
  PYPIPE_EMULATOR_ENTER();
  if (context != nullptr && !is_device(Contexts::device_of(context))) return invalid_value;
  Contexts::set_current(context);
  return cuda::Result::success;
}

cuda::Result cuCtxSynchronize() {
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  ++engine().synchronizations;
  engine().streams.synchronize_device(lock, Contexts::device(), true);
  return cuda::Result::success;
}

cuda::Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cuda::Result::success;
}

cuda::Result cuStreamCreateWithPriority(cuda::StreamHandle* stream, unsigned flags, int /*priority*/) {
  if (stream == nullptr || flags > cuda::stream_non_blocking) return invalid_value;
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  *stream = engine().streams.create();
  return cuda::Result::success;
}

cuda::Result cuStreamDestroy_v2(cuda::StreamHandle stream) {
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  return engine().streams.destroy(stream) ? cuda::Result::success : invalid_handle;
}

cuda::Result cuStreamQuery(cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  if (Streams::is_host(handle)) return cuda::Result::success;
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  if (stream->capture) {
    return engine().captures.invalidate(*stream->capture, capture_errors::unsupported, "a query of its stream");
  }
  if (stream->completed != stream->issued) return cuda::Result::not_ready;
  engine().host().clock.join(stream->clock);
  return cuda::Result::success;
}

cuda::Result cuStreamSynchronize(cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  ++engine().synchronizations;
  if (Streams::is_host(handle)) return cuda::Result::success;
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  if (stream->capture) {
    return engine().captures.invalidate(*stream->capture, capture_errors::unsupported, "a wait for its stream");
  }
  Streams::note_deferred(*stream);
  Streams::synchronize(lock, *stream);
  return cuda::Result::success;
}

cuda::Result cuStreamWaitEvent(cuda::StreamHandle handle, cuda::EventHandle event, unsigned flags) {
  if (flags > 1) return invalid_value;
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  const std::shared_ptr<Record> record = what->latest;
  if (Streams::is_host(handle)) {
    if (!record) return cuda::Result::success;
    engine().host_wait(lock, record->changed, "the event recorded on " + record->where, [&] { return record->done; });
    engine().host().clock.join(record->clock);
    return cuda::Result::success;
  }
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  cuda::Result answer = cuda::Result::success;
  if (engine().captures.waits(*stream, *what, answer)) return answer;
  if (record) Streams::wait(*stream, record, Issue::now());
  return cuda::Result::success;
}

cuda::Result cuEventCreate(cuda::EventHandle* event, unsigned /*flags*/) {
  if (event == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  *event = engine().streams.create_event();
  return cuda::Result::success;
}

cuda::Result cuEventDestroy_v2(cuda::EventHandle event) {
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  return engine().streams.destroy_event(event) ? cuda::Result::success : invalid_handle;
}

cuda::Result cuEventRecord(cuda::EventHandle event, cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  if (Streams::is_host(handle)) {
    Streams::host_record(*what);
    return cuda::Result::success;
  }
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  if (stream->device != what->device) {
    engine().reports.hazard("context", "an event of device " + std::to_string(what->device) + " is recorded on " +
                                           stream->name + " of device " + std::to_string(stream->device) + ": " +
                                           describe(Call::site()));
    return invalid_handle;
  }
  what->capture = stream->capture;
  what->captured_on = stream->handle;
  if (stream->capture) return cuda::Result::success;
  Streams::note_deferred(*stream);
  what->latest = Streams::record(*stream, Issue::now());
  return cuda::Result::success;
}

cuda::Result cuEventQuery(cuda::EventHandle event) {
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  if (what->capture) return capture_errors::captured_event;
  if (!what->latest) return cuda::Result::success;
  if (!what->latest->done) return cuda::Result::not_ready;
  engine().host().clock.join(what->latest->clock);
  return cuda::Result::success;
}

cuda::Result cuEventSynchronize(cuda::EventHandle event) {
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  ++engine().synchronizations;
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  if (what->capture) return capture_errors::captured_event;
  const std::shared_ptr<Record> record = what->latest;
  if (!record) return cuda::Result::success;
  engine().host_wait(lock, record->changed, "the event recorded on " + record->where, [&] { return record->done; });
  engine().host().clock.join(record->clock);
  return cuda::Result::success;
}

cuda::Result cuMemAlloc_v2(cuda::Pointer* pointer, std::size_t bytes) {
  if (pointer == nullptr || bytes == 0) return invalid_value;
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  void* data = engine().memory.allocate(bytes);
  *pointer = reinterpret_cast<std::uintptr_t>(data);
  return data == nullptr ? out_of_memory : cuda::Result::success;
}

cuda::Result cuMemFree_v2(cuda::Pointer pointer) {
  PYPIPE_EMULATOR_ENTER_UNSAFE();
  ++engine().synchronizations;
  if (engine().memory.free(lock, memory_at(pointer))) return cuda::Result::success;
  engine().reports.hazard("usage", "no such allocation: " + describe(Call::site()));
  return invalid_value;
}

cuda::Result cuMemcpyAsync(cuda::Pointer target, cuda::Pointer source, std::size_t bytes, cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  if (Streams::is_host(handle)) {
    engine().host_access(memory_at(source), bytes, false, "copy");
    engine().host_access(memory_at(target), bytes, true, "copy");
    lock.unlock();
    std::memmove(memory_at(target), memory_at(source), bytes);
    return cuda::Result::success;
  }
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  Streams::append(*stream, std::make_unique<CopyOperation>(memory_at(target), memory_at(source), bytes, stream->name));
  return cuda::Result::success;
}

cuda::Result cuStreamBeginCapture_v2(cuda::StreamHandle handle, int mode) {
  if (mode < 0 || mode > 2) return invalid_value;
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return capture_errors::unsupported;  // the legacy stream
  if (Streams::is_host(handle)) return capture_errors::unsupported;
  const auto stream = engine().streams.find(handle);
  return stream ? engine().captures.begin(*stream, static_cast<CaptureMode>(mode)) : invalid_handle;
}

cuda::Result cuStreamEndCapture(cuda::StreamHandle handle, void** graph) {
  if (graph == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  *graph = nullptr;
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  const cuda::Result result = engine().captures.end(*stream);
  if (result == cuda::Result::success) *graph = stream.get();  // nothing takes it
  return result;
}

cuda::Result cuStreamIsCapturing(cuda::StreamHandle handle, int* status) {
  if (status == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER_CONTEXT();
  *status = 0;
  if (Streams::is_host(handle)) return cuda::Result::success;
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  if (stream->capture) *status = stream->capture->invalid ? 2 : 1;
  return cuda::Result::success;
}

cuda::Result cuThreadExchangeStreamCaptureMode(cuda::CaptureMode* mode) {
  if (mode == nullptr || static_cast<unsigned>(*mode) > 2) return invalid_value;
  *mode = static_cast<cuda::CaptureMode>(Captures::exchange(static_cast<CaptureMode>(*mode)));
  return cuda::Result::success;
}
}
