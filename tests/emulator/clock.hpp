// Vector clocks. An actor is a stream or a host thread of some process; its ticks count its operations.
#pragma once

#include <cstdint>
#include <vector>

namespace pypipe::emulator {

using Actor = std::uint64_t;  // process << 32 | number in the process

struct Epoch {
  Actor actor = 0;
  std::uint64_t tick = 0;
};

class Clock {
 public:
  using Entry = Epoch;

  [[nodiscard]] std::uint64_t of(Actor actor) const noexcept;
  [[nodiscard]] bool covers(Epoch epoch) const noexcept { return of(epoch.actor) >= epoch.tick; }

  Epoch tick(Actor actor);
  void join(const Clock& other);

  [[nodiscard]] const std::vector<Entry>& entries() const noexcept { return entries_; }
  // Entries that came over the wire; they are sorted, as entries() was.
  [[nodiscard]] static Clock from(std::vector<Entry> entries);

 private:
  std::vector<Entry> entries_;  // sorted by actor
};

}  // namespace pypipe::emulator
