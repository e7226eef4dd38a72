// A GPU and its primary context, the one that torch uses.
#pragma once

#include <memory>

#include "link/nccl/cuda_api.hpp"

namespace pypipe::cuda {

using ApiPointer = std::shared_ptr<const Api>;

// Retains the primary context, so that it lives as long as this does.
class Gpu {
 public:
  // Throws Error{system} where there is no such GPU.
  Gpu(ApiPointer api, int ordinal);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  [[nodiscard]] const ApiPointer& api() const noexcept { return api_; }
  [[nodiscard]] Context context() const noexcept { return context_; }
  [[nodiscard]] int multiprocessors() const;

 private:
  ApiPointer api_;
  Device gpu_ = 0;
  Context context_ = nullptr;
};

using GpuPointer = std::shared_ptr<const Gpu>;

// Makes the device's context current on this thread for as long as this lives. Whoever calls the core may be on another
// thread than the one that built the pipeline, or have made another GPU current.
class Current {
 public:
  explicit Current(const Gpu& gpu);
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current();

 private:
  const Api& api_;
  Context before_ = nullptr;
  bool changed_ = false;
};

}  // namespace pypipe::cuda
