// A channel: one stage boundary in one direction, on top of a link. It adds layouts, tags and the count of
// slots.
//
// The payload of a layout frame: u64 bytes of a message, u32 id of a layout that the sender has forgotten (0: no
// layout), u32 zero, then the layout's description, which only Python reads, at both ends. A sender announces a layout
// before the first message of that layout; both travel in order, so a receiver that meets an unknown id finds it in its
// inbox.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/wait.hpp"
#include "control/hub.hpp"
#include "link/link.hpp"

namespace pypipe {

inline constexpr std::size_t part_alignment = 64;

// Offsets of parts of these sizes in one message, each aligned, and the message's size as the last element.
[[nodiscard]] std::vector<std::size_t> pack(std::span<const std::size_t> sizes);

// Counters that tests and `pypipe doctor` read.
struct ChannelCounters {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t layouts = 0;      // announced or received
  std::uint64_t allocations = 0;  // of slot memory
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t alive = 0;       // received and not released
  std::uint64_t most_alive = 0;  // ever
};

// Announces layouts for one channel, over any link.
class LayoutAnnouncer {
 public:
  LayoutAnnouncer(Hub& hub, int peer, std::uint32_t channel) : hub_(hub), peer_(peer), channel_(channel) {}
  // Returns the new layout's id. `forgotten`: the id of a layout that will not be used again, or 0.
  std::uint32_t announce(std::string_view description, std::size_t bytes, std::uint32_t forgotten,
                         const WaitPolicy& policy);

 private:
  Hub& hub_;
  const int peer_;
  const std::uint32_t channel_;
  std::uint32_t last_ = 0;
};

// The layouts that a peer announced for one channel.
class LayoutBook {
 public:
  struct Layout {
    std::size_t bytes = 0;
    std::string description;
  };
  LayoutBook(Hub& hub, int peer, std::uint32_t channel) : hub_(hub), peer_(peer), channel_(channel) {}
  // The layout of this id; if it is new, takes it from the control socket.
  [[nodiscard]] const Layout& find(std::uint32_t id, const WaitPolicy& policy);
  [[nodiscard]] std::uint64_t received() const noexcept { return received_; }

 private:
  Hub& hub_;
  const int peer_;
  const std::uint32_t channel_;
  std::uint64_t received_ = 0;
  std::uint64_t newest_ = 0;
  std::map<std::uint32_t, Layout> layouts_;
};

// The sending end of a channel.
class ChannelSender {
 public:
  ChannelSender(Hub& hub, SendLink& link, int peer, std::uint32_t channel, std::uint32_t slots);

  std::uint32_t announce(std::string_view description, std::size_t bytes, std::uint32_t forgotten,
                         const WaitPolicy& policy);
  // Fills in the envelope's channel and bytes. Returns the message's number on the link; its parts are needed until
  // sent() returns that number.
  std::uint64_t send(Envelope envelope, std::span<const Part> parts, Stream stream, const WaitPolicy& policy);
  // Whether send() would find a slot free, as far as the link can tell.
  [[nodiscard]] bool has_room() { return link_.has_room(channel_); }
  [[nodiscard]] std::uint64_t sent() { return link_.sent(); }
  void finish(Stream stream) { link_.finish(stream); }
  [[nodiscard]] const ChannelCounters& counters() const noexcept { return counters_; }

 private:
  SendLink& link_;
  const std::uint32_t channel_;
  LayoutAnnouncer announcer_;
  WaitHistories histories_;
  ChannelCounters counters_;
};

// The receiving end of a channel.
class ChannelReceiver {
 public:
  ChannelReceiver(Hub& hub, ReceiveLink& link, int peer, std::uint32_t channel, std::uint32_t slots);

  void begin(std::uint32_t run) { link_.begin(channel_, run); }
  void post(Stream stream, const WaitPolicy& policy) { link_.post(channel_, stream, policy); }
  // The next message, which must be the one of this tag. Throws Error{mismatch} otherwise.
  [[nodiscard]] Arrival receive(const MessageTag& expected, Stream stream, const WaitPolicy& policy);
  [[nodiscard]] const LayoutBook::Layout& layout(std::uint32_t id, const WaitPolicy& policy) {
    return layouts_.find(id, policy);
  }
  void release(const Slot& slot, Stream stream);
  [[nodiscard]] const ChannelCounters& counters() const noexcept { return counters_; }

 private:
  ReceiveLink& link_;
  const int peer_;
  const std::uint32_t channel_;
  std::uint32_t generation_ = 0;
  WaitHistories histories_;
  LayoutBook layouts_;
  ChannelCounters counters_;
};

// Throws Error{mismatch} that names both sides unless the envelope is the one expected.
void check_tag(const Envelope& got, std::uint32_t channel, const MessageTag& expected, int peer);

}  // namespace pypipe
