// A CUDA driver and an NCCL that do nothing and have always done it: what is left of a call is pypipe's own part.
//   c++ -std=c++20 -O2 -shared -fPIC -I csrc -o libidle.so benchmarks/idle_device.cpp
// One file for both libraries. nccl_host.py builds it.
#include <cstdlib>
#include <cstring>

#include "link/nccl/cuda_abi.hpp"
#include "link/nccl/nccl_abi.hpp"

namespace {

// A handle that is not null. Nobody looks behind it.
template <class Handle>
void give(Handle* handle) {
  static char somewhere;
  *handle = reinterpret_cast<Handle>(&somewhere);
}

void number(int* place, int value) {
  if (place != nullptr) *place = value;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace pypipe::cuda {

constexpr Result done = Result::success;

EXPORT Result cuInit(unsigned) { return done; }
EXPORT Result cuDriverGetVersion(int* version) { return number(version, 13000), done; }
EXPORT Result cuGetErrorName(Result, const char** text) { return *text = "none", done; }
EXPORT Result cuGetErrorString(Result, const char** text) { return *text = "none", done; }
EXPORT Result cuDeviceGetCount(int* count) { return number(count, 1), done; }
EXPORT Result cuDeviceGet(Device* device, int) { return *device = 0, done; }
EXPORT Result cuDeviceGetName(char* name, int bytes, Device) { return std::strncpy(name, "idle", bytes), done; }
EXPORT Result cuDeviceGetAttribute(int* value, int, Device) { return number(value, 132), done; }
EXPORT Result cuThreadExchangeStreamCaptureMode(CaptureMode*) { return done; }
EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device) { return give(context), done; }
EXPORT Result cuDevicePrimaryCtxRelease_v2(Device) { return done; }
EXPORT Result cuCtxGetCurrent(Context* context) { return give(context), done; }
EXPORT Result cuCtxSetCurrent(Context) { return done; }
EXPORT Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return number(least, 0), number(greatest, -5), done;
}
EXPORT Result cuStreamCreateWithPriority(StreamHandle* stream, unsigned, int) { return give(stream), done; }
EXPORT Result cuStreamDestroy_v2(StreamHandle) { return done; }
EXPORT Result cuStreamQuery(StreamHandle) { return done; }
EXPORT Result cuStreamSynchronize(StreamHandle) { return done; }
EXPORT Result cuStreamWaitEvent(StreamHandle, EventHandle, unsigned) { return done; }
EXPORT Result cuEventCreate(EventHandle* event, unsigned) { return give(event), done; }
EXPORT Result cuEventDestroy_v2(EventHandle) { return done; }
EXPORT Result cuEventRecord(EventHandle, StreamHandle) { return done; }
EXPORT Result cuEventQuery(EventHandle) { return done; }
EXPORT Result cuEventSynchronize(EventHandle) { return done; }
EXPORT Result cuMemAlloc_v2(Pointer* pointer, std::size_t bytes) {
  return *pointer = reinterpret_cast<Pointer>(std::malloc(bytes)), done;
}
EXPORT Result cuMemFree_v2(Pointer pointer) { return std::free(reinterpret_cast<void*>(pointer)), done; }
EXPORT Result cuMemcpyAsync(Pointer, Pointer, std::size_t, StreamHandle) { return done; }

}  // namespace pypipe::cuda

namespace pypipe::nccl {

constexpr Result done = Result::success;

EXPORT Result ncclGetVersion(int* version) { return number(version, 23007), done; }
EXPORT Result ncclGetUniqueId(UniqueId* id) { return std::memset(id, 1, sizeof *id), done; }
EXPORT Result ncclCommInitRankConfig(CommunicatorHandle* communicator, int, UniqueId, int, Config*) {
  return give(communicator), done;
}
EXPORT Result ncclCommGetAsyncError(CommunicatorHandle, Result* result) { return *result = done, done; }
EXPORT Result ncclCommFinalize(CommunicatorHandle) { return done; }
EXPORT Result ncclCommDestroy(CommunicatorHandle) { return done; }
EXPORT Result ncclCommAbort(CommunicatorHandle) { return done; }
EXPORT Result ncclGroupStart() { return done; }
EXPORT Result ncclGroupEnd() { return done; }
EXPORT Result ncclSend(const void*, std::size_t, int, int, CommunicatorHandle, cuda::StreamHandle) { return done; }
EXPORT Result ncclRecv(void*, std::size_t, int, int, CommunicatorHandle, cuda::StreamHandle) { return done; }
EXPORT const char* ncclGetErrorString(Result) { return "none"; }
EXPORT const char* ncclGetLastError(CommunicatorHandle) { return "none"; }

}  // namespace pypipe::nccl
