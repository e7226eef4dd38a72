// libnccl.so.2: every function locks the engine and hands over. Compiled a second time with
// PYPIPE_EMULATOR_OLD_NCCL, it is NCCL 2.18: without the optional functions.
#include "abi.hpp"
#include "communicator.hpp"
#include "enter.hpp"
#include "groups.hpp"
#include "transport.hpp"

using namespace pypipe;
using namespace pypipe::emulator;

namespace {

#ifdef PYPIPE_EMULATOR_OLD_NCCL
constexpr int own_version = 21805;
#else
constexpr int own_version = 23007;
#endif

int version_now() { return engine().knobs.version != 0 ? engine().knobs.version : own_version; }

}  // namespace

extern "C" {

nccl::Result ncclGetVersion(int* version) {
  if (version == nullptr) return nccl::Result::invalid_argument;
  PYPIPE_EMULATOR_ENTER();
  *version = version_now();
  return nccl::Result::success;
}

nccl::Result ncclGetUniqueId(nccl::UniqueId* id) {
  if (id == nullptr) return nccl::Result::invalid_argument;
  PYPIPE_EMULATOR_ENTER();
  std::string problem;
  const nccl::Result result = make_unique_id(*id, problem);
  return result == nccl::Result::success ? result : engine().communicators.refuse(result, problem);
}

nccl::Result ncclCommInitRankConfig(nccl::CommunicatorHandle* communicator, int size, nccl::UniqueId id, int rank,
                                    nccl::Config* config) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.create(lock, communicator, size, id, rank, config, version_now());
}

nccl::Result ncclCommGetAsyncError(nccl::CommunicatorHandle communicator, nccl::Result* result) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.async_error(communicator, result);
}

nccl::Result ncclCommFinalize(nccl::CommunicatorHandle communicator) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.finalize(lock, communicator);
}

nccl::Result ncclCommDestroy(nccl::CommunicatorHandle communicator) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.destroy(lock, communicator);
}

nccl::Result ncclCommAbort(nccl::CommunicatorHandle communicator) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.abort(lock, communicator);
}

nccl::Result ncclGroupStart() {
  PYPIPE_EMULATOR_ENTER();
  return group_start();
}

nccl::Result ncclGroupEnd() {
  PYPIPE_EMULATOR_ENTER();
  return group_end(lock);
}

nccl::Result ncclSend(const void* data, std::size_t count, int type, int peer, nccl::CommunicatorHandle communicator,
                      cuda::StreamHandle stream) {
  PYPIPE_EMULATOR_ENTER();
  return transfer(lock, "ncclSend", data, count, type, peer, communicator, stream);
}

nccl::Result ncclRecv(void* data, std::size_t count, int type, int peer, nccl::CommunicatorHandle communicator,
                      cuda::StreamHandle stream) {
  PYPIPE_EMULATOR_ENTER();
  return transfer(lock, "ncclRecv", data, count, type, peer, communicator, stream);
}

#ifndef PYPIPE_EMULATOR_OLD_NCCL

nccl::Result ncclCommRegister(nccl::CommunicatorHandle communicator, void* data, std::size_t bytes, void** handle) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.enroll(communicator, data, bytes, handle);
}

nccl::Result ncclCommDeregister(nccl::CommunicatorHandle communicator, void* handle) {
  PYPIPE_EMULATOR_ENTER();
  return engine().communicators.withdraw(communicator, handle);
}

nccl::Result ncclMemAlloc(void** data, std::size_t bytes) {
  if (data == nullptr || bytes == 0) return nccl::Result::invalid_argument;
  PYPIPE_EMULATOR_ENTER();
  *data = engine().memory.allocate(bytes);
  return *data == nullptr ? nccl::Result::unhandled_cuda_error : nccl::Result::success;
}

nccl::Result ncclMemFree(void* data) {
  PYPIPE_EMULATOR_ENTER();
  ++engine().synchronizations;
  if (engine().memory.free(lock, data)) return nccl::Result::success;
  return engine().communicators.refuse(nccl::Result::invalid_argument, "no such allocation");
}

#endif

const char* ncclGetErrorString(nccl::Result result) {
  switch (static_cast<int>(result)) {
    case 0:
      return "no error";
    case 1:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case 2:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case 3:
      return "internal error - please report this issue to the NCCL developers";
    case 4:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case 5:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case 6:
      return "remote process exited or there was a network error";
    case 7:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(nccl::CommunicatorHandle /*communicator*/) {
  PYPIPE_EMULATOR_ENTER();
  return engine().intern(engine().communicators.last_error());
}
}
