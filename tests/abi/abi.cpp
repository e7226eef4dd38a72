// Asserts, at compile time, that csrc/link's declarations of CUDA and NCCL agree with the real headers.
//
// tests/core/test_abi.py compiles it against the packages of the test extra. By hand, against another release:
//   g++ -std=c++20 -fsyntax-only -Wall -Wextra -Icsrc -isystem <with nccl.h> -isystem <with cuda.h>
//   tests/abi/abi.cpp

// nccl.h includes the headers of short floats without using them; they would need one more package. These are their
// include guards.
#define __CUDA_FP16_H__  // NOLINT(bugprone-reserved-identifier)
#define __CUDA_BF16_H__  // NOLINT(bugprone-reserved-identifier)
#define __CUDA_FP8_H__   // NOLINT(bugprone-reserved-identifier)

#include <cuda.h>
#include <nccl.h>

#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "link/nccl/cuda_abi.hpp"
#include "link/nccl/nccl_abi.hpp"

// Two types are the same to a caller if they are equal, are pointers to such types, or are listed here.
namespace abi {

template <class Ours, class Theirs>
struct Same : std::is_same<Ours, Theirs> {};
template <class Ours, class Theirs>
struct Same<Ours*, Theirs*> : Same<Ours, Theirs> {};
template <class Ours, class Theirs>
struct Same<const Ours, const Theirs> : Same<Ours, Theirs> {};

// Opaque structs, used only by address.
template <>
struct Same<pypipe::cuda::CUctx_st, CUctx_st> : std::true_type {};
template <>
struct Same<pypipe::cuda::CUstream_st, CUstream_st> : std::true_type {};
template <>
struct Same<pypipe::cuda::CUevent_st, CUevent_st> : std::true_type {};
template <>
struct Same<pypipe::nccl::ncclComm, ncclComm> : std::true_type {};

// An enum is passed as an integer of its size.
template <class Ours, class Theirs>
struct SameNumber : std::bool_constant<(std::is_enum_v<Ours> || std::is_integral_v<Ours>) && std::is_enum_v<Theirs> &&
                                       sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs)> {};
template <>
struct Same<pypipe::cuda::Result, CUresult> : SameNumber<pypipe::cuda::Result, CUresult> {};
template <>
struct Same<pypipe::nccl::Result, ncclResult_t> : SameNumber<pypipe::nccl::Result, ncclResult_t> {};
template <>
struct Same<int, ncclDataType_t> : SameNumber<int, ncclDataType_t> {};
template <>
struct Same<int, CUdevice_attribute> : SameNumber<int, CUdevice_attribute> {};
template <>
struct Same<pypipe::cuda::CaptureMode, CUstreamCaptureMode>
    : SameNumber<pypipe::cuda::CaptureMode, CUstreamCaptureMode> {};

// Their members are compared below. By value, only trivial structs of the same size and alignment are passed alike.
template <class Ours, class Theirs>
constexpr bool plain =
    std::is_trivially_copyable_v<Ours> && std::is_standard_layout_v<Ours> && alignof(Ours) == alignof(Theirs);
template <>
struct Same<pypipe::nccl::UniqueId, ncclUniqueId>
    : std::bool_constant<plain<pypipe::nccl::UniqueId, ncclUniqueId> &&
                         sizeof(pypipe::nccl::UniqueId) == sizeof(ncclUniqueId)> {};
template <>
struct Same<pypipe::nccl::Config, ncclConfig_t> : std::bool_constant<plain<pypipe::nccl::Config, ncclConfig_t>> {};

// Parameter by parameter, and the result.
template <class Ours, class Theirs, bool same_number>
struct SameEach : std::false_type {};
template <class... Ours, class... Theirs>
struct SameEach<std::tuple<Ours...>, std::tuple<Theirs...>, true>
    : std::bool_constant<(Same<Ours, Theirs>::value && ...)> {};
template <class OurResult, class... Ours, class TheirResult, class... Theirs>
struct Same<OurResult(Ours...), TheirResult(Theirs...)>
    : SameEach<std::tuple<OurResult, Ours...>, std::tuple<TheirResult, Theirs...>,
               sizeof...(Ours) == sizeof...(Theirs)> {};

// The rules above reject what they should.
static_assert(!Same<int(int), int(int, int)>::value);
static_assert(!Same<int(unsigned), int(int)>::value);
static_assert(!Same<int(const void*), int(void*)>::value);
static_assert(!Same<int(std::size_t), int(unsigned)>::value);
static_assert(!Same<pypipe::cuda::EventHandle, CUstream>::value);
static_assert(!Same<pypipe::nccl::CommunicatorHandle*, ncclComm_t>::value);

}  // namespace abi

// cuda.h renames functions by macros (cuMemAlloc is cuMemAlloc_v2), and dlsym does not see macros: a name in our table
// must be the one that the header's declaration has after macros are expanded.
#define SPELLED(name) std::string_view(#name)
#define EXPANDED(name) SPELLED(name)

namespace cuda_functions {
using pypipe::cuda::CaptureMode;
using pypipe::cuda::Context;
using pypipe::cuda::Device;
using pypipe::cuda::EventHandle;
using pypipe::cuda::Pointer;
using pypipe::cuda::Result;
using pypipe::cuda::StreamHandle;
#define AGREE(member, symbol, parameters)                                                   \
  static_assert(std::string_view(#symbol) == EXPANDED(symbol), #symbol " is an older ABI"); \
  static_assert(abi::Same<Result parameters, decltype(::symbol)>::value, #symbol);
PYPIPE_CUDA_SYMBOLS(AGREE)
#undef AGREE
}  // namespace cuda_functions

static_assert(static_cast<int>(pypipe::cuda::Result::success) == CUDA_SUCCESS);
static_assert(static_cast<int>(pypipe::cuda::Result::not_ready) == CUDA_ERROR_NOT_READY);
static_assert(pypipe::cuda::stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(pypipe::cuda::event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(pypipe::cuda::attribute_multiprocessor_count == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(static_cast<int>(pypipe::cuda::CaptureMode::relaxed) == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(std::is_same_v<pypipe::cuda::Device, CUdevice>);
static_assert(std::is_same_v<pypipe::cuda::Pointer, CUdeviceptr>);
static_assert(std::is_same_v<CUstream, cudaStream_t>, "torch's streams are the runtime's");

namespace nccl_functions {
namespace cuda = pypipe::cuda;
using pypipe::nccl::CommunicatorHandle;
using pypipe::nccl::Config;
using pypipe::nccl::Result;
using pypipe::nccl::UniqueId;
#define AGREE(member, symbol, parameters)                       \
  static_assert(std::string_view(#symbol) == EXPANDED(symbol)); \
  static_assert(abi::Same<Result parameters, decltype(::symbol)>::value, #symbol);
PYPIPE_NCCL_SYMBOLS(AGREE)
#undef AGREE
#define AGREE(member, symbol, parameters) \
  static_assert(abi::Same<const char* parameters, decltype(::symbol)>::value, #symbol);
PYPIPE_NCCL_TEXT_SYMBOLS(AGREE)
#undef AGREE
}  // namespace nccl_functions

namespace nccl_values {
using pypipe::nccl::Result;
static_assert(static_cast<int>(Result::success) == ncclSuccess);
static_assert(static_cast<int>(Result::unhandled_cuda_error) == ncclUnhandledCudaError);
static_assert(static_cast<int>(Result::system_error) == ncclSystemError);
static_assert(static_cast<int>(Result::internal_error) == ncclInternalError);
static_assert(static_cast<int>(Result::invalid_argument) == ncclInvalidArgument);
static_assert(static_cast<int>(Result::invalid_usage) == ncclInvalidUsage);
static_assert(static_cast<int>(Result::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(Result::in_progress) == ncclInProgress);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0)
static_assert(static_cast<int>(Result::timeout) == ncclTimeout);
#endif
static_assert(pypipe::nccl::uint8 == ncclUint8);
static_assert(pypipe::nccl::unset == NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_CONFIG_UNDEF_PTR == nullptr);
static_assert(pypipe::nccl::encode_version(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH) == NCCL_VERSION_CODE);
}  // namespace nccl_values

namespace nccl_config {
using pypipe::nccl::Config;
static_assert(sizeof(((Config*)nullptr)->magic) == 4 && Config{}.magic == 0xcafebeef);
static_assert(Config{}.size == sizeof(Config));

#define AGREE(ours, theirs)                                                         \
  static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs), #theirs); \
  static_assert(std::is_same_v<decltype(Config::ours), decltype(ncclConfig_t::theirs)>, #theirs);
AGREE(size, size)
AGREE(magic, magic)
AGREE(version, version)
AGREE(blocking, blocking)
AGREE(cga_cluster_size, cgaClusterSize)
AGREE(min_ctas, minCTAs)
AGREE(max_ctas, maxCTAs)
AGREE(net_name, netName)
AGREE(split_share, splitShare)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 26, 0)
AGREE(traffic_class, trafficClass)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
AGREE(comm_name, commName)
AGREE(collnet_enable, collnetEnable)
AGREE(cta_policy, CTAPolicy)
AGREE(shrink_share, shrinkShare)
AGREE(nvls_ctas, nvlsCTAs)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
AGREE(channels_per_net_peer, nChannelsPerNetPeer)
AGREE(nvlink_centric_sched, nvlinkCentricSched)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
AGREE(graph_usage_mode, graphUsageMode)
AGREE(num_rma_ctx, numRmaCtx)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0)
AGREE(max_p2p_peers, maxP2pPeers)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 5)
AGREE(graph_stream_ordering, graphStreamOrdering)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 31, 0)
AGREE(launch_order_implicit, launchOrderImplicit)
AGREE(num_rma_sig, numRmaSig)
AGREE(rma_eager_init, rmaEagerInit)
AGREE(host_cft_mode, hostCftMode)
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
AGREE(nvls_host_mode, nvlsHostMode)
#endif
#undef AGREE

// A library of this release or an older one copies only bytes of our struct. A newer one has more fields.
constexpr bool known_release = NCCL_VERSION_CODE <= pypipe::nccl::config_version;
static_assert(!known_release || sizeof(ncclConfig_t) <= sizeof(Config));
static_assert(known_release || sizeof(ncclConfig_t) >= sizeof(Config));
static_assert(NCCL_VERSION_CODE != pypipe::nccl::config_version || sizeof(ncclConfig_t) == sizeof(Config));
}  // namespace nccl_config
