#include "link/nccl/cuda_gpu.hpp"

#include <utility>

namespace pypipe::cuda {

Gpu::Gpu(ApiPointer api, int ordinal) : api_(std::move(api)) {
  api_->check(api_->init(0));
  api_->check(api_->device_get(&gpu_, ordinal));
  api_->check(api_->primary_context_retain(&context_, gpu_));
}

Gpu::~Gpu() { (void)succeeded(api_->primary_context_release(gpu_)); }  // a destructor cannot report an error

int Gpu::multiprocessors() const {
  int count = 0;
  api_->check(api_->device_get_attribute(&count, attribute_multiprocessor_count, gpu_));
  return count;
}

Current::Current(const Gpu& gpu) : api_(*gpu.api()) {
  api_.check(api_.context_get_current(&before_));
  if (before_ == gpu.context()) return;
  api_.check(api_.context_set_current(gpu.context()));
  changed_ = true;
}

Current::~Current() {
  if (changed_) (void)succeeded(api_.context_set_current(before_));
}

}  // namespace pypipe::cuda
