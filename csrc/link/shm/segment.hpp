// Shared memory that travels as a descriptor: no name, no /dev/shm, nothing left behind.
#pragma once

#include <cstddef>
#include <memory>

#include "base/fd.hpp"

namespace pypipe {

// One mapping of an anonymous memory file. Its size is sealed, so that neither end can make the other fault.
class Segment {
 public:
  // Creates and maps zeroed memory, with all of its pages allocated. Throws Error{system} when there is not
  // enough.
  [[nodiscard]] static std::shared_ptr<Segment> create(std::size_t bytes);

  // Maps what a peer created. A descriptor that is mapped in this process already yields that mapping.
  // Throws Error{protocol} when it is not a sealed memory file of exactly `bytes` bytes.
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
