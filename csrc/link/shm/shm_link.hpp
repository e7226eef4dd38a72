// The link between two processes of one host: the sender copies each message once, into the receiver's slot.
//
// Memory. One small segment per link holds two rings of fixed size; one segment per channel and generation holds the
// slots. The sender creates them all, and passes the descriptors over the control socket before it publishes a message
// that refers to them, so the receiver never waits for anything but that socket.
//
// Protocol of the rings (single producer, single consumer; counters only grow, index = counter % capacity):
//   messages[]  written by the sender, then `published` (release); read by the receiver after `published` (acquire)
//   slot bytes  written by the sender before `published`; owned by the receiver until it returns the slot
//   credits[]   written by the receiver, then `returned` (release); read by the sender after `returned` (acquire)
// A slot is written only while the sender has its credit. There are never more messages in flight than the link's
// channels have slots, which is the capacity of both rings, so neither ring can overflow.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/wait.hpp"
#include "control/hub.hpp"
#include "link/link.hpp"
#include "link/shm/segment.hpp"

namespace pypipe {

struct ShmRings;

class ShmSendLink final : public SendLink {
 public:
  // `link` names the link between the two ranks; `capacity` is the number of slots of all its channels.
  ShmSendLink(Hub& hub, int peer, std::uint32_t link, std::uint32_t capacity, const WaitPolicy& policy);
  ~ShmSendLink() override;

  void reserve(std::uint32_t channel, std::uint32_t slots, std::size_t bytes, const WaitPolicy& policy) override;
  std::uint64_t send(const Envelope& envelope, std::span<const Part> parts, Stream stream, const WaitPolicy& policy,
                     WaitHistory& history) override;
  [[nodiscard]] bool has_room(std::uint32_t channel) override;
  [[nodiscard]] std::uint64_t sent() override { return published_; }

 private:
  struct Lane {
    std::uint32_t generation = 0;
    std::uint32_t slots = 0;
    std::uint32_t old_in_flight = 0;  // messages in slots of older generations
    std::size_t bytes = 0;
    std::vector<std::uint32_t> free;
    std::vector<bool> out;  // of this generation's slots: in flight
    std::shared_ptr<Segment> memory;
  };
  void collect_credits();
  bool has_room(const Lane& lane);

  Hub& hub_;
  const int peer_;
  const std::uint32_t capacity_;
  std::shared_ptr<Segment> memory_;
  ShmRings* rings_;
  std::uint64_t published_ = 0;
  std::uint64_t collected_ = 0;
  std::map<std::uint32_t, Lane> lanes_;
};

class ShmReceiveLink final : public ReceiveLink {
 public:
  // Waits for the sender's rings.
  ShmReceiveLink(Hub& hub, int peer, std::uint32_t link, std::uint32_t capacity, const WaitPolicy& policy);
  ~ShmReceiveLink() override;

  void post(std::uint32_t channel, Stream stream, const WaitPolicy& policy) override;
  [[nodiscard]] Arrival receive(Stream stream, const WaitPolicy& policy, WaitHistory& history) override;
  void release(const Slot& slot, Stream stream) override;

 private:
  struct Lane {
    std::uint32_t generation = 0;
    std::uint32_t slots = 0;
    std::size_t bytes = 0;
    std::shared_ptr<Segment> memory;
  };
  Lane& lane(std::uint32_t channel, std::uint32_t generation, const WaitPolicy& policy);

  Hub& hub_;
  const int peer_;
  const std::uint32_t capacity_;
  std::shared_ptr<Segment> memory_;
  ShmRings* rings_;
  std::uint64_t consumed_ = 0;
  std::uint64_t returned_ = 0;
  std::map<std::uint32_t, Lane> lanes_;
};

}  // namespace pypipe
