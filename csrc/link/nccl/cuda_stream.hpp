// Owners of streams and events.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "link/nccl/cuda_gpu.hpp"

namespace pypipe::cuda {

// A non-blocking stream of the highest priority. The destructor does not wait: the driver keeps queued work until it has
// run.
class Stream {
 public:
  explicit Stream(const Gpu& gpu) : api_(gpu.api()) {
    const Current current(gpu);
    int least = 0;
    int greatest = 0;
    api_->check(api_->context_get_priority_range(&least, &greatest));
    api_->check(api_->stream_create(&handle_, stream_non_blocking, greatest));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { (void)succeeded(api_->stream_destroy(handle_)); }  // a destructor cannot report an error

  [[nodiscard]] StreamHandle handle() const noexcept { return handle_; }

 private:
  ApiPointer api_;
  StreamHandle handle_ = nullptr;
};

// An event without timing.
class Event {
 public:
  explicit Event(const Gpu& gpu) : api_(gpu.api()) {
    const Current current(gpu);
    api_->check(api_->event_create(&handle_, event_disable_timing));
  }
  Event(Event&& other) noexcept : api_(std::move(other.api_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (handle_ != nullptr) (void)succeeded(api_->event_destroy(handle_));
  }

  void record(StreamHandle stream) const { api_->check(api_->event_record(handle_, stream)); }
  // Work that is enqueued on `stream` from now on runs after what was recorded last.
  void hold_up(StreamHandle stream) const { api_->check(api_->stream_wait_event(stream, handle_, 0)); }
  [[nodiscard]] EventHandle handle() const noexcept { return handle_; }
  [[nodiscard]] bool done() const { return api_->ready(api_->event_query(handle_)); }

 private:
  ApiPointer api_;
  EventHandle handle_ = nullptr;
};

// Events for reuse: a steady state creates no new ones.
class EventPool {
 public:
  explicit EventPool(GpuPointer gpu) : gpu_(std::move(gpu)) {}

  [[nodiscard]] Event take() {
    std::optional<Event> event = spare();
    return event ? *std::move(event) : Event(*gpu_);
  }
  // One that need not be made, if there is any.
  [[nodiscard]] std::optional<Event> spare() {
    if (free_.empty()) return std::nullopt;
    Event event = std::move(free_.back());
    free_.pop_back();
    return event;
  }
  void give_back(Event event) { free_.push_back(std::move(event)); }

 private:
  GpuPointer gpu_;
  std::vector<Event> free_;
};

}  // namespace pypipe::cuda
