#include "clock.hpp"

#include <algorithm>
#include <utility>

namespace pypipe::emulator {
namespace {

bool earlier(const Clock::Entry& entry, Actor actor) { return entry.actor < actor; }

}  // namespace

std::uint64_t Clock::of(Actor actor) const noexcept {
  const auto at = std::lower_bound(entries_.begin(), entries_.end(), actor, earlier);
  return at != entries_.end() && at->actor == actor ? at->tick : 0;
}

Epoch Clock::tick(Actor actor) {
  auto at = std::lower_bound(entries_.begin(), entries_.end(), actor, earlier);
  if (at == entries_.end() || at->actor != actor) at = entries_.insert(at, {actor, 0});
  ++at->tick;
  return *at;
}

void Clock::join(const Clock& other) {
  if (other.entries_.empty()) return;
  std::vector<Entry> both;
  both.reserve(std::max(entries_.size(), other.entries_.size()) + 4);
  auto mine = entries_.begin();
  auto theirs = other.entries_.begin();
  while (mine != entries_.end() || theirs != other.entries_.end()) {
    if (theirs == other.entries_.end() || (mine != entries_.end() && mine->actor < theirs->actor)) {
      both.push_back(*mine++);
    } else if (mine == entries_.end() || theirs->actor < mine->actor) {
      both.push_back(*theirs++);
    } else {
      both.push_back({mine->actor, std::max(mine->tick, theirs->tick)});
      ++mine;
      ++theirs;
    }
  }
  entries_ = std::move(both);
}

Clock Clock::from(std::vector<Entry> entries) {
  Clock clock;
  clock.entries_ = std::move(entries);
  return clock;
}

}  // namespace pypipe::emulator
