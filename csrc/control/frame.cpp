#include "control/frame.hpp"

#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "control/rank_status.hpp"

namespace pypipe {
namespace {

constexpr std::uint32_t magic = 0x31507950;  // "PyP1"
constexpr std::size_t most_descriptors = 64;

// Both ends are checked to be the same version and byte order before a socket becomes a control socket.
struct Header {
  std::uint32_t magic;
  std::uint16_t type;
  std::uint16_t reserved;
  std::uint32_t channel;
  std::uint32_t bytes;
  std::uint64_t value;
};
static_assert(sizeof(Header) == frame_header_bytes);

}  // namespace

std::optional<std::size_t> limit(FrameType type) noexcept {
  switch (type) {
    case FrameType::layout:
      return layout_limit;
    case FrameType::memory:
    case FrameType::envelope:
      return std::size_t{256};
    case FrameType::abort:
      return abort_limit;
    case FrameType::answer:
      return sizeof(RankStatus);
    case FrameType::leave:
    case FrameType::record:
    case FrameType::ask:
      return std::size_t{0};
  }
  return std::nullopt;
}

std::array<std::byte, frame_header_bytes> encode_header(FrameType type, std::uint32_t channel, std::uint64_t value,
                                                        std::size_t payload_bytes) {
  const auto most = limit(type);
  if (!most || payload_bytes > *most) {
    throw Error(Fault::usage, "a control frame of type " + std::to_string(static_cast<unsigned>(type)) + " with " +
                                  std::to_string(payload_bytes) + " bytes is over its limit");
  }
  const Header header{magic,   static_cast<std::uint16_t>(type),          0,
                      channel, static_cast<std::uint32_t>(payload_bytes), value};
  std::array<std::byte, frame_header_bytes> bytes{};
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

void FrameReader::feed(std::span<const std::byte> bytes) {
  if (start_ > 0 && start_ == buffer_.size()) {
    buffer_.clear();
    start_ = 0;
  }
  buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void FrameReader::feed(Fd descriptor) {
  if (descriptors_.size() >= most_descriptors) {
    throw Error(Fault::protocol, "more descriptors than frames that could carry them");
  }
  descriptors_.push_back(std::move(descriptor));
}

std::optional<Frame> FrameReader::next() {
  const std::size_t available = buffer_.size() - start_;
  if (available < frame_header_bytes) return std::nullopt;
  Header header{};
  std::memcpy(&header, buffer_.data() + start_, sizeof(header));
  const auto type = static_cast<FrameType>(header.type);
  const auto most = limit(type);
  if (header.magic != magic || header.reserved != 0 || !most) {
    throw Error(Fault::protocol, "bytes that are not a pypipe control frame");
  }
  if (header.bytes > *most) {
    throw Error(Fault::protocol, "a control frame announces " + std::to_string(header.bytes) + " bytes where at most " +
                                     std::to_string(*most) + " are allowed");
  }
  if (available < frame_header_bytes + header.bytes) return std::nullopt;
  Frame frame;
  frame.type = type;
  frame.channel = header.channel;
  frame.value = header.value;
  frame.payload.assign(buffer_, start_ + frame_header_bytes, header.bytes);
  if (type == FrameType::memory || type == FrameType::record) {
    if (descriptors_.empty()) throw Error(Fault::protocol, "a frame came without its descriptor");
    frame.descriptor = std::move(descriptors_.front());
    descriptors_.pop_front();
  }
  start_ += frame_header_bytes + header.bytes;
  if (start_ > (std::size_t{1} << 16)) {
    buffer_.erase(0, start_);
    start_ = 0;
  }
  return frame;
}

}  // namespace pypipe
