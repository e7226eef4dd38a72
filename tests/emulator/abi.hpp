// The functions that the two libraries export, declared from the product's own lists: a definition with another
// signature does not compile, and a program that links against one that is missing does not link.
#pragma once

#include "link/nccl/cuda_abi.hpp"
#include "link/nccl/nccl_abi.hpp"

// What NCCL has from 2.19 on, and the product leaves alone.
#define PYPIPE_NCCL_OPTIONAL_SYMBOLS(X)                                                                               \
  X(comm_register, ncclCommRegister, (CommunicatorHandle communicator, void* data, std::size_t bytes, void** handle)) \
  X(comm_deregister, ncclCommDeregister, (CommunicatorHandle communicator, void* handle))                             \
  X(memory_allocate, ncclMemAlloc, (void** data, std::size_t bytes))                                                  \
  X(memory_free, ncclMemFree, (void* data))

#define PYPIPE_TYPE(member, name, parameters) using name = Result parameters;
#define PYPIPE_TEXT_TYPE(member, name, parameters) using name = const char* parameters;
namespace pypipe::cuda::functions {
PYPIPE_CUDA_SYMBOLS(PYPIPE_TYPE)
}
namespace pypipe::nccl::functions {
PYPIPE_NCCL_SYMBOLS(PYPIPE_TYPE)
PYPIPE_NCCL_OPTIONAL_SYMBOLS(PYPIPE_TYPE)
PYPIPE_NCCL_TEXT_SYMBOLS(PYPIPE_TEXT_TYPE)
}  // namespace pypipe::nccl::functions
#undef PYPIPE_TYPE
#undef PYPIPE_TEXT_TYPE

#pragma GCC visibility push(default)
extern "C" {
#define PYPIPE_DECLARE(member, name, parameters) pypipe::cuda::functions::name name;
PYPIPE_CUDA_SYMBOLS(PYPIPE_DECLARE)
#undef PYPIPE_DECLARE
#define PYPIPE_DECLARE(member, name, parameters) pypipe::nccl::functions::name name;
PYPIPE_NCCL_SYMBOLS(PYPIPE_DECLARE)
PYPIPE_NCCL_OPTIONAL_SYMBOLS(PYPIPE_DECLARE)
PYPIPE_NCCL_TEXT_SYMBOLS(PYPIPE_DECLARE)
#undef PYPIPE_DECLARE
// What host programs call, and torch, but the product does not.
pypipe::cuda::Result cuCtxSynchronize();
pypipe::cuda::Result cuStreamBeginCapture_v2(pypipe::cuda::StreamHandle stream, int mode);
pypipe::cuda::Result cuStreamEndCapture(pypipe::cuda::StreamHandle stream, void** graph);
pypipe::cuda::Result cuStreamIsCapturing(pypipe::cuda::StreamHandle stream, int* status);
}
#pragma GCC visibility pop
