// NCCL, opened at run time: one typed table of the functions that pypipe calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/library.hpp"
#include "base/wait.hpp"
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
  PYPIPE_NCCL_OPTIONAL_SYMBOLS(PYPIPE_DECLARE)  // false where the release lacks it
#undef PYPIPE_DECLARE

  // Throws Error{system} with the function, the error, its number and NCCL's last warning, unless the call succeeded or,
  // on a non-blocking communicator, is in progress: comm_get_async_error then tells how it ends.
  void check(const Status& status) const {
    if (status.result != Result::success && status.result != Result::in_progress) fail(status);
  }

  // The same for a result of comm_get_async_error, after a call of `what` (a function's name).
  void check(Result result, const char* what) const { check(Status{result, what}); }

  // "ncclRemoteError (6): remote process exited or there was a network error".
  [[nodiscard]] std::string describe(Result result) const;

  [[nodiscard]] const std::string& path() const noexcept { return library_.path(); }
  [[nodiscard]] int version() const noexcept { return version_; }  // 23007 is 2.30.7

  // The optional functions that this release lacks.
  [[nodiscard]] std::vector<std::string> absent() const;

 private:
  explicit Api(const Library& library);
  [[noreturn]] void fail(const Status& status) const;

#define PYPIPE_DECLARE(member, symbol, parameters) const Symbol<const char* parameters> member;
  PYPIPE_NCCL_TEXT_SYMBOLS(PYPIPE_DECLARE)
#undef PYPIPE_DECLARE

  Library library_;
  int version_ = 0;
};

[[nodiscard]] inline bool succeeded(const Status& status) noexcept {
  return status.result == Result::success || status.result == Result::in_progress;
}

// "2.30.7" for 23007.
[[nodiscard]] std::string version_text(int version);

// A link's choices for its communicator.
struct CommunicatorOptions {
  int min_ctas = unset;
  int max_ctas = unset;
  const char* name = nullptr;          // must live as long as the communicator
  bool launch_order_implicit = false;  // 2.31 and later; older releases have an environment variable for it
};

// The configuration, for a library of this version, of a non-blocking communicator that shares nothing with others.
[[nodiscard]] Config make_config(int version, const CommunicatorOptions& options) noexcept;

// After a call of `what` (a function's name), polls a non-blocking communicator until the call is no longer in progress.
// Throws Error{system} with NCCL's error, Error{timeout}, and what `policy.interruption` throws.
void settle(const Api& api, CommunicatorHandle communicator, const char* what, const WaitPolicy& policy);

[[nodiscard]] UniqueId make_unique_id(const Api& api);

// Checks that NCCL works: makes a communicator of one rank on the current device, and destroys it. Throws what NCCL says
// if that fails.
void try_communicator(const Api& api, const WaitPolicy& policy);

}  // namespace pypipe::nccl
