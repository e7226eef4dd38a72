// Our own declarations of the part of NCCL's ABI that pypipe calls, 2.18 to 2.32. tests/abi compiles them
// beside the real nccl.h and asserts that they agree.
#pragma once

#include <climits>
#include <cstddef>

#include "link/nccl/cuda_abi.hpp"

namespace pypipe::nccl {

enum class Result : int {  // ncclResult_t
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
  timeout = 8,  // 2.30
};

inline constexpr int uint8 = 1;  // ncclUint8: bytes are all that NCCL needs to know

struct UniqueId {  // ncclUniqueId, passed by value
  char internal[128];
};

struct ncclComm;
using CommunicatorHandle = ncclComm*;  // ncclComm_t

// The number that ncclGetVersion gives for a release.
constexpr int encode_version(int major, int minor, int patch) noexcept { return (major * 100 + minor) * 100 + patch; }
inline constexpr int oldest_version = encode_version(2, 18, 0);
inline constexpr int config_version = encode_version(2, 32, 3);

inline constexpr int unset = INT_MIN;

// ncclConfig_t of 2.32. It only ever grew at its end: a library copies min(size, its own size) bytes and
// resets what is newer than `version`. So this one serves every release, with `version` set to the library's
// own or config_version, whichever is older. Make one with make_config (nccl_api.hpp).
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 0;
  int blocking = unset;
  int cga_cluster_size = unset;
  int min_ctas = unset;
  int max_ctas = unset;
  const char* net_name = nullptr;
  int split_share = unset;
  int traffic_class = unset;        // 2.26
  const char* comm_name = nullptr;  // 2.27 from here; NCCL keeps the pointer
  int collnet_enable = unset;
  int cta_policy = unset;
  int shrink_share = unset;
  int nvls_ctas = unset;
  int channels_per_net_peer = unset;  // 2.28
  int nvlink_centric_sched = unset;
  int graph_usage_mode = unset;  // 2.29
  int num_rma_ctx = unset;
  int max_p2p_peers = unset;          // 2.30
  int graph_stream_ordering = unset;  // 2.30.5
  int launch_order_implicit = unset;  // 2.31 from here
  int num_rma_sig = unset;
  int rma_eager_init = unset;
  int host_cft_mode = unset;
  int nvls_host_mode = unset;  // 2.32
  int padding = unset;         // where a later release puts its next field
};

// X(member, exported name, parameters): every function returns an ncclResult_t.
#define PYPIPE_NCCL_SYMBOLS(X)                                                                       \
  X(get_version, ncclGetVersion, (int* version))                                                     \
  X(get_unique_id, ncclGetUniqueId, (UniqueId * id))                                                 \
  X(comm_init_rank_config, ncclCommInitRankConfig,                                                   \
    (CommunicatorHandle * communicator, int size, UniqueId id, int rank, Config* config))            \
  X(comm_get_async_error, ncclCommGetAsyncError, (CommunicatorHandle communicator, Result * result)) \
  X(comm_finalize, ncclCommFinalize, (CommunicatorHandle communicator))                              \
  X(comm_destroy, ncclCommDestroy, (CommunicatorHandle communicator))                                \
  X(comm_abort, ncclCommAbort, (CommunicatorHandle communicator))                                    \
  X(group_start, ncclGroupStart, ())                                                                 \
  X(group_end, ncclGroupEnd, ())                                                                     \
  X(send, ncclSend,                                                                                  \
    (const void* data, std::size_t count, int type, int peer, CommunicatorHandle communicator,       \
     cuda::StreamHandle stream))                                                                     \
  X(receive, ncclRecv,                                                                               \
    (void* data, std::size_t count, int type, int peer, CommunicatorHandle communicator, cuda::StreamHandle stream))

// These return text.
#define PYPIPE_NCCL_TEXT_SYMBOLS(X)                        \
  X(get_error_string, ncclGetErrorString, (Result result)) \
  X(get_last_error, ncclGetLastError, (CommunicatorHandle communicator))

}  // namespace pypipe::nccl
