// Makes and checks causes of failures.
#pragma once

#include <string>
#include <utility>

#include "check.hpp"
#include "control/cause.hpp"

namespace pypipe::test {

inline Cause failure(std::string message) {
  Cause cause;
  cause.message = std::move(message);
  return cause;
}

inline void check_lost(const Cause& cause, std::int32_t rank, std::int32_t seen_by) {
  check(cause.kind == CauseKind::lost && cause.rank == rank && cause.seen_by == seen_by,
        "the cause: kind " + std::to_string(static_cast<std::uint32_t>(cause.kind)) + " of rank " +
            std::to_string(cause.rank) + ", seen by rank " + std::to_string(cause.seen_by) + ": " + cause.message);
}

}  // namespace pypipe::test
