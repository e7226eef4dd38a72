// What links share: the sizes of slots, and their frames on the control socket.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/error.hpp"
#include "control/frame.hpp"
#include "link/link.hpp"

namespace pypipe {

// Frames of a link itself share the numbers of channels; the top bit keeps them apart.
inline constexpr std::uint32_t link_frames = std::uint32_t{1} << 31;

// The size of a slot for messages of `bytes` bytes. Slots grow in steps of an eighth of their power of two: at most
// 12.5 % is unused, and sizes that creep upwards cost a logarithmic number of allocations.
[[nodiscard]] inline std::size_t slot_size(std::size_t bytes) {
  if (bytes <= 4096) return 4096;
  const std::size_t step = std::bit_floor(bytes) >> 3;
  return (bytes + step - 1) & ~(step - 1);
}

[[nodiscard]] inline Envelope envelope_of(const Frame& frame) {
  Envelope envelope;
  if (frame.payload.size() != sizeof(envelope)) throw Error(Fault::protocol, "an envelope of the wrong length");
  std::memcpy(&envelope, frame.payload.data(), sizeof(envelope));
  return envelope;
}

}  // namespace pypipe
