// Our own declarations of the part of the CUDA driver's ABI that pypipe calls. tests/abi compiles them beside
// the real cuda.h and asserts that they agree. Nothing of CUDA is needed to build.
#pragma once

#include <cstddef>

namespace pypipe::cuda {

// CUresult; other values are only reported.
enum class Result : int { success = 0, not_ready = 600 };
enum class CaptureMode : int { relaxed = 2 };  // CUstreamCaptureMode

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;

using Device = int;                  // CUdevice
using Context = CUctx_st*;           // CUcontext
using StreamHandle = CUstream_st*;   // CUstream, which is cudaStream_t
using EventHandle = CUevent_st*;     // CUevent
using Pointer = unsigned long long;  // CUdeviceptr

inline constexpr unsigned stream_non_blocking = 1;         // CU_STREAM_NON_BLOCKING
inline constexpr unsigned event_disable_timing = 2;        // CU_EVENT_DISABLE_TIMING
inline constexpr int attribute_multiprocessor_count = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

// X(member, exported name, parameters): every function returns a CUresult. All of them are in every driver
// that runs CUDA 11 or later. An exported name with a suffix is the one that cuda.h gives to the plain name;
// the plain one is an older ABI.
#define PYPIPE_CUDA_SYMBOLS(X)                                                                        \
  X(init, cuInit, (unsigned flags))                                                                   \
  X(driver_get_version, cuDriverGetVersion, (int* version))                                           \
  X(get_error_name, cuGetErrorName, (Result result, const char** text))                               \
  X(get_error_string, cuGetErrorString, (Result result, const char** text))                           \
  X(device_get_count, cuDeviceGetCount, (int* count))                                                 \
  X(device_get, cuDeviceGet, (Device * device, int ordinal))                                          \
  X(device_get_name, cuDeviceGetName, (char* name, int bytes, Device device))                         \
  X(device_get_attribute, cuDeviceGetAttribute, (int* value, int attribute, Device device))           \
  X(primary_context_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))             \
  X(primary_context_release, cuDevicePrimaryCtxRelease_v2, (Device device))                           \
  X(context_get_current, cuCtxGetCurrent, (Context * context))                                        \
  X(context_set_current, cuCtxSetCurrent, (Context context))                                          \
  X(context_get_priority_range, cuCtxGetStreamPriorityRange, (int* least, int* greatest))             \
  X(stream_create, cuStreamCreateWithPriority, (StreamHandle * stream, unsigned flags, int priority)) \
  X(stream_destroy, cuStreamDestroy_v2, (StreamHandle stream))                                        \
  X(stream_query, cuStreamQuery, (StreamHandle stream))                                               \
  X(stream_synchronize, cuStreamSynchronize, (StreamHandle stream))                                   \
  X(stream_wait_event, cuStreamWaitEvent, (StreamHandle stream, EventHandle event, unsigned flags))   \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (CaptureMode * mode))                   \
  X(event_create, cuEventCreate, (EventHandle * event, unsigned flags))                               \
  X(event_destroy, cuEventDestroy_v2, (EventHandle event))                                            \
  X(event_record, cuEventRecord, (EventHandle event, StreamHandle stream))                            \
  X(event_query, cuEventQuery, (EventHandle event))                                                   \
  X(event_synchronize, cuEventSynchronize, (EventHandle event))                                       \
  X(memory_allocate, cuMemAlloc_v2, (Pointer * pointer, std::size_t bytes))                           \
  X(memory_free, cuMemFree_v2, (Pointer pointer))                                                     \
  X(copy_async, cuMemcpyAsync, (Pointer target, Pointer source, std::size_t bytes, StreamHandle stream))

}  // namespace pypipe::cuda
