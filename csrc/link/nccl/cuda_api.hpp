// The CUDA driver, opened at run time: one typed table of the functions that pypipe calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/library.hpp"
#include "link/nccl/cuda_abi.hpp"

namespace pypipe::cuda {

using Status = pypipe::Status<Result>;

// Use: `cuda.check(cuda.event_record(event, stream))`. A destructor, which cannot throw, calls succeeded().
class Api {
 public:
  // No value if this machine has no driver. Throws Error{system} if the driver lacks a function.
  [[nodiscard]] static Found<std::shared_ptr<const Api>> load(const std::string& override_path);

#define PYPIPE_DECLARE(member, symbol, parameters) const Symbol<Result parameters> member;
  PYPIPE_CUDA_SYMBOLS(PYPIPE_DECLARE)
#undef PYPIPE_DECLARE

  // Throws Error{system} that names the function, the error and its number, unless the call succeeded.
  void check(const Status& status) const {
    if (status.result != Result::success) fail(status);
  }

  // For stream_query and event_query: whether all work is done. Throws as check() does.
  [[nodiscard]] bool ready(const Status& status) const {
    if (status.result == Result::not_ready) return false;
    check(status);
    return true;
  }

  // "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected".
  [[nodiscard]] std::string describe(Result result) const;

  [[nodiscard]] const std::string& path() const noexcept { return library_.path(); }

  // The newest CUDA release that the driver can run: 12040 is 12.4.
  [[nodiscard]] int version() const;

  // The names of the GPUs that this process may use. Initializes the driver. Throws Error{system} if there are none.
  [[nodiscard]] std::vector<std::string> device_names() const;

 private:
  explicit Api(const Library& library);
  [[noreturn]] void fail(const Status& status) const;

  Library library_;
};

[[nodiscard]] inline bool succeeded(const Status& status) noexcept { return status.result == Result::success; }

}  // namespace pypipe::cuda
