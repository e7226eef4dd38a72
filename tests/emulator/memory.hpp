// Allocations, poison, freed memory, and the buffers of operations that are not done.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "access.hpp"

namespace pypipe::emulator {

class Memory {
 public:
  // Memory of the device: filled with poison, between two fences that are checked when it is freed.
  [[nodiscard]] void* allocate(std::size_t bytes);
  // False when there is no such allocation. Pending operations on it are reported; then it waits for all of the device,
  // which no caller may rely on.
  bool free(std::unique_lock<std::mutex>& lock, void* data);
  // Of our allocations: the device, or -1.
  [[nodiscard]] int device_of(Range range) const;

  // Memory of others, see control.h.
  void allocated(Range range);
  void freed(std::unique_lock<std::mutex>& lock, Range range);

  // Reports an access to freed memory, or across the end of an allocation.
  void check(const Access& access) const;

  // From the call that makes an operation until the operation is done.
  void pend(Buffer& buffer) { pending_.insert(&buffer); }
  void done(Buffer& buffer) { pending_.erase(&buffer); }

  // A buffer whose bytes are being moved without the lock is left alone until then.
  void copied(Buffer& buffer) {
    buffer.copying = false;
    copied_.notify_all();
  }

  [[nodiscard]] std::uint64_t allocations() const noexcept { return allocations_; }
  void reset_counter() noexcept { allocations_ = 0; }
  // Reports each operation that still needs the memory, and gives it poison of its own.
  void take_from_pending(std::unique_lock<std::mutex>& lock, Range range);

 private:
  std::map<std::uintptr_t, std::size_t> live_;     // our allocations
  std::map<std::uintptr_t, int> devices_;          // of those
  std::map<std::uintptr_t, std::size_t> foreign_;  // announced by `allocated`
  std::map<std::uintptr_t, std::size_t> freed_;    // of both kinds
  std::deque<Range> quarantine_;                   // our freed ones, not yet given back
  std::size_t quarantined_ = 0;
  std::set<Buffer*> pending_;
  std::condition_variable copied_;
  std::uint64_t allocations_ = 0;
};

}  // namespace pypipe::emulator
