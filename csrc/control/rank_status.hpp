// What a rank is doing. These structs travel as they are: both ends have the same version and byte order.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

namespace pypipe {

// One action of a rank, and when it was done.
struct ActionEntry {
  std::uint32_t stage = 0;
  std::uint32_t kind = 0;  // ActionKind, unless a peer sent something else
  std::uint32_t microbatch = 0;
  std::uint32_t step = 0;   // counts the steps of its rank, from 1
  std::uint64_t start = 0;  // nanoseconds of CLOCK_MONOTONIC
  std::uint64_t ready = 0;  // when it had what it waited for; 0: not yet, or nothing to wait for
  std::uint64_t end = 0;    // 0: in progress
};

struct RankStatus {
  std::uint32_t rank = 0;
  std::uint32_t step = 0;       // the latest step begun; 0: no step yet
  std::uint32_t running = 0;    // whether `now` is in progress
  std::uint32_t completed = 0;  // whether there is a `last`
  ActionEntry now;              // its times, and those of `last`, are nanoseconds ago; 0: not yet
  ActionEntry last;
  std::uint64_t busy = 0;        // nanoseconds since it began the work named in `work`; 0: not busy
  std::uint64_t busy_ended = 0;  // nanoseconds since it was last busy; 0: never
  std::array<char, 96> work{};
};

// A status, and where it comes from.
struct RankReport {
  RankStatus status;
  std::uint32_t silent = 0;  // the rank did not answer; this is what its record says
  std::uint32_t reserved = 0;
};

static_assert(std::is_trivially_copyable_v<RankReport> && sizeof(RankReport) == sizeof(RankStatus) + 8);

}  // namespace pypipe
