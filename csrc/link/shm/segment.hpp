// Shared memory that is passed on as a descriptor: it has no name in /dev/shm, and nothing of it is left behind.
#pragma once

#include <cstddef>
#include <memory>

#include "base/fd.hpp"

namespace pypipe {

// One mapping of an anonymous memory file. Its size is sealed, so that neither end can make the other fault.
class Segment {
 public:
  // Creates and maps zeroed memory, with all pages allocated. Throws Error{system} if there is not enough.
  [[nodiscard]] static std::shared_ptr<Segment> create(std::size_t bytes);

  // Maps memory that a peer created. If this process has mapped it already, returns that mapping.
  // Throws Error{protocol} if it is not a sealed memory file of exactly `bytes` bytes.
  [[nodiscard]] static std::shared_ptr<Segment> attach(Fd descriptor, std::size_t bytes);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }

 private:
  Segment(Fd descriptor, std::size_t bytes);
  Fd descriptor_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace pypipe
