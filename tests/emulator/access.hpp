// What is known of one access to memory: who, what, where, and from which call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "clock.hpp"

namespace pypipe::emulator {

inline constexpr unsigned char poison = 0xfb;

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  [[nodiscard]] bool overlaps(Range other) const noexcept { return begin < other.end && other.begin < end; }
  [[nodiscard]] bool empty() const noexcept { return begin >= end; }
};

inline Range range_of(const void* data, std::size_t bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + bytes};
}

// The call that caused something: the exported function, who called it, and the label that the caller had
// set.
struct Site {
  const char* function = "";
  const void* caller = nullptr;
  const char* label = nullptr;
};

struct Access {
  Range range;
  bool write = false;
  bool host = false;      // by a host thread, not by a stream
  Epoch epoch;            // filled in when it happens
  const char* name = "";  // ncclSend, copy, or the name that compute gave
  std::string where;      // the stream, or the thread
  std::uint64_t sequence = 0;
  Site site;
};

std::string describe(const Access& access);
std::string describe(const Site& site);

// Memory that an operation will use. Pending ones are known to the engine (see memory.hpp), so that freeing
// the memory under one is noticed. `data` then becomes the substitute's.
struct Buffer {
  Access access;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool copying = false;  // its bytes are being moved just now, without the engine's lock
  bool moot = false;     // its communicator was aborted: nothing will touch it any more
  std::vector<std::byte> substitute;
};

}  // namespace pypipe::emulator
