// libcuda.so.1: every function locks the engine and hands over.
#include <cstring>

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

thread_local cuda::Context current_context = nullptr;

cuda::Context primary() { return reinterpret_cast<cuda::Context>(0x4400000000000010U); }

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
  *count = 1;
  return cuda::Result::success;
}

cuda::Result cuDeviceGet(cuda::Device* device, int ordinal) {
  if (device == nullptr || ordinal != 0) return invalid_device;
  *device = 0;
  return cuda::Result::success;
}

cuda::Result cuDeviceGetName(char* name, int bytes, cuda::Device device) {
  if (name == nullptr || bytes <= 0 || device != 0) return invalid_value;
  constexpr const char* text = "pypipe emulator (CPU)";
  std::strncpy(name, text, static_cast<std::size_t>(bytes) - 1);
  name[bytes - 1] = 0;
  return cuda::Result::success;
}

cuda::Result cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  if (context == nullptr || device != 0) return invalid_value;
  *context = primary();
  return cuda::Result::success;
}

cuda::Result cuDevicePrimaryCtxRelease_v2(cuda::Device device) {
  return device == 0 ? cuda::Result::success : invalid_device;
}

cuda::Result cuCtxGetCurrent(cuda::Context* context) {
  if (context == nullptr) return invalid_value;
  *context = current_context;
  return cuda::Result::success;
}

cuda::Result cuCtxSetCurrent(cuda::Context context) {
  if (context != nullptr && context != primary()) return invalid_value;
  current_context = context;
  return cuda::Result::success;
}

cuda::Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cuda::Result::success;
}

cuda::Result cuStreamCreateWithPriority(cuda::StreamHandle* stream, unsigned flags, int /*priority*/) {
  if (stream == nullptr || flags > cuda::stream_non_blocking) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
  *stream = engine().streams.create();
  return cuda::Result::success;
}

cuda::Result cuStreamDestroy_v2(cuda::StreamHandle stream) {
  PYPIPE_EMULATOR_ENTER();
  return engine().streams.destroy(stream) ? cuda::Result::success : invalid_handle;
}

cuda::Result cuStreamQuery(cuda::StreamHandle handle) {
  if (Streams::is_host(handle)) return cuda::Result::success;
  PYPIPE_EMULATOR_ENTER();
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  if (stream->completed != stream->issued) return cuda::Result::not_ready;
  engine().host().clock.join(stream->clock);
  return cuda::Result::success;
}

cuda::Result cuStreamSynchronize(cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER();
  ++engine().synchronizations;
  if (Streams::is_host(handle)) return cuda::Result::success;
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  Streams::note_deferred(*stream);
  Streams::synchronize(lock, *stream);
  return cuda::Result::success;
}

cuda::Result cuStreamWaitEvent(cuda::StreamHandle handle, cuda::EventHandle event, unsigned flags) {
  if (flags > 1) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
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
  if (record) Streams::wait(*stream, record, Issue::now());
  return cuda::Result::success;
}

cuda::Result cuEventCreate(cuda::EventHandle* event, unsigned /*flags*/) {
  if (event == nullptr) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
  *event = engine().streams.create_event();
  return cuda::Result::success;
}

cuda::Result cuEventDestroy_v2(cuda::EventHandle event) {
  PYPIPE_EMULATOR_ENTER();
  return engine().streams.destroy_event(event) ? cuda::Result::success : invalid_handle;
}

cuda::Result cuEventRecord(cuda::EventHandle event, cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER();
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  if (Streams::is_host(handle)) {
    Streams::host_record(*what);
    return cuda::Result::success;
  }
  const auto stream = engine().streams.find(handle);
  if (!stream) return invalid_handle;
  Streams::note_deferred(*stream);
  what->latest = Streams::record(*stream, Issue::now());
  return cuda::Result::success;
}

cuda::Result cuEventQuery(cuda::EventHandle event) {
  PYPIPE_EMULATOR_ENTER();
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  if (!what->latest) return cuda::Result::success;
  if (!what->latest->done) return cuda::Result::not_ready;
  engine().host().clock.join(what->latest->clock);
  return cuda::Result::success;
}

cuda::Result cuEventSynchronize(cuda::EventHandle event) {
  PYPIPE_EMULATOR_ENTER();
  ++engine().synchronizations;
  const auto what = engine().streams.find_event(event);
  if (!what) return invalid_handle;
  const std::shared_ptr<Record> record = what->latest;
  if (!record) return cuda::Result::success;
  engine().host_wait(lock, record->changed, "the event recorded on " + record->where, [&] { return record->done; });
  engine().host().clock.join(record->clock);
  return cuda::Result::success;
}

cuda::Result cuMemAlloc_v2(cuda::Pointer* pointer, std::size_t bytes) {
  if (pointer == nullptr || bytes == 0) return invalid_value;
  PYPIPE_EMULATOR_ENTER();
  void* data = engine().memory.allocate(bytes);
  *pointer = reinterpret_cast<std::uintptr_t>(data);
  return data == nullptr ? out_of_memory : cuda::Result::success;
}

cuda::Result cuMemFree_v2(cuda::Pointer pointer) {
  PYPIPE_EMULATOR_ENTER();
  ++engine().synchronizations;
  if (engine().memory.free(lock, memory_at(pointer))) return cuda::Result::success;
  engine().reports.hazard("usage", "no such allocation: " + describe(Call::site()));
  return invalid_value;
}

cuda::Result cuMemcpyAsync(cuda::Pointer target, cuda::Pointer source, std::size_t bytes, cuda::StreamHandle handle) {
  PYPIPE_EMULATOR_ENTER();
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
}
