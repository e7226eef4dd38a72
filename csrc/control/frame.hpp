// Frames of the control sockets: a fixed header, then at most `limit(type)` bytes. Nothing in them is executed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/fd.hpp"

namespace pypipe {

enum class FrameType : std::uint16_t {
  layout = 1,    // channel, value = layout id; payload: see channel/channel.hpp
  memory = 2,    // channel, value = generation; carries a descriptor; payload: see link/shm/shm_link.cpp
  envelope = 3,  // channel; payload: an Envelope, for links that do not carry it themselves
  abort = 4,     // value = the step from which on ranks stop, payload: the first cause; see cause.hpp
  leave = 5,     // the peer sends no more messages; the end of its socket is expected
  record = 6,    // carries the descriptor of the sender's record; see control/action_log.hpp
  ask = 7,       // channel = the rank that asks what all ranks do, value = its question's number
  answer = 8,    // the same; payload: a RankStatus
};

struct Frame {
  FrameType type = FrameType::leave;
  std::uint32_t channel = 0;
  std::uint64_t value = 0;
  std::string payload;
  Fd descriptor;
};

inline constexpr std::size_t frame_header_bytes = 24;
inline constexpr std::size_t layout_limit = std::size_t{1} << 20;  // bytes of a payload
inline constexpr std::size_t abort_limit = std::size_t{1} << 18;

// The largest payload in bytes of a frame of this type; nothing for an unknown type.
[[nodiscard]] std::optional<std::size_t> limit(FrameType type) noexcept;

// The header of a frame. Throws Error{usage} when the payload is larger than the type allows.
[[nodiscard]] std::array<std::byte, frame_header_bytes> encode_header(FrameType type, std::uint32_t channel,
                                                                      std::uint64_t value, std::size_t payload_bytes);

// Cuts a byte stream into frames. Every length is checked before anything is allocated for it.
class FrameReader {
 public:
  // Adds what a read returned. Descriptors arrive beside the stream, in the order of their frames.
  void feed(std::span<const std::byte> bytes);
  void feed(Fd descriptor);

  // The next whole frame, if there is one. Throws Error{protocol} on bytes that are not a frame.
  [[nodiscard]] std::optional<Frame> next();

 private:
  std::string buffer_;
  std::size_t start_ = 0;
  std::deque<Fd> descriptors_;
};

}  // namespace pypipe
