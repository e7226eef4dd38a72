// NCCL, opened at run time: one typed table of the functions that pypipe calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/library.hpp"
#include "base/wait.hpp"
#include "link/nccl/cuda_gpu.hpp"
#include "link/nccl/nccl_abi.hpp"

namespace pypipe::nccl {

using Status = pypipe::Status<Result>;

// Use: `nccl.check(nccl.send(...))`. A destructor, which cannot throw, calls succeeded().
class Api {
 public:
  // `candidates`: files to try if this process has not loaded libnccl.so.2 yet. No value if this machine has no NCCL.
  // Throws Error{system} if it lacks a function or is older than 2.18.
  [[nodiscard]] static Found<std::shared_ptr<const Api>> load(const std::string& override_path,
                                                              const std::vector<std::string>& candidates);

#define PYPIPE_DECLARE(member, symbol, parameters) const Symbol<Result parameters> member;
  PYPIPE_NCCL_SYMBOLS(PYPIPE_DECLARE)
#undef PYPIPE_DECLARE

  // Throws Error{system} with the function, the error, its number and NCCL's last warning, unless the call succeeded.
  void check(const Status& status) const {
    if (status.result != Result::success) fail(status);
  }

  // The same for a result of comm_get_async_error, after a call of `what` (a function's name).
  void check(Result result, const char* what) const { check(Status{result, what}); }

  // "ncclRemoteError (6): remote process exited or there was a network error".
  [[nodiscard]] std::string describe(Result result) const;

  [[nodiscard]] const std::string& path() const noexcept { return library_.path(); }
  [[nodiscard]] int version() const noexcept { return version_; }  // 23007 is 2.30.7

 private:
  explicit Api(const Library& library);
  [[noreturn]] void fail(const Status& status) const;

#define PYPIPE_DECLARE(member, symbol, parameters) const Symbol<const char* parameters> member;
  PYPIPE_NCCL_TEXT_SYMBOLS(PYPIPE_DECLARE)
#undef PYPIPE_DECLARE

  Library library_;
  int version_ = 0;
};

[[nodiscard]] inline bool succeeded(const Status& status) noexcept { return status.result == Result::success; }

// "2.30.7" for 23007.
[[nodiscard]] std::string version_text(int version);

// A link's choices for its communicator.
struct CommunicatorOptions {
  int min_ctas = unset;
  int max_ctas = unset;
  const char* name = nullptr;  // must live as long as the communicator
};

// The configuration, for a library of this version, of a communicator that shares nothing with others.
//
// It blocks: a call returns when it has done its work. On a communicator that does not, NCCL starts a thread for the end
// of every group and answers "in progress" (src/group.cc, groupLaunchNonBlocking, of 2.28.9 and 2.30.7), and the caller
// has to poll. Calls that may have to wait for other ranks are BoundedCalls instead; there are none in a step.
[[nodiscard]] Config make_config(int version, const CommunicatorOptions& options) noexcept;

[[nodiscard]] UniqueId make_unique_id(const Api& api);

// Checks that NCCL works: makes a communicator of one rank on a GPU, by default on the one that CUDA takes by itself, and
// destroys it. Throws what NCCL says if that fails.
void try_communicator(const std::shared_ptr<const Api>& api, const cuda::GpuPointer& gpu, const WaitPolicy& policy);

}  // namespace pypipe::nccl
