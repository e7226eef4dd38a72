// The first cause of a pipeline's failure, as it travels in abort frames and lies in records.
//
// Its bytes: a fixed header, which has the lengths of the texts and the number of reports, then the texts in the order
// of the members, then the reports. decode() checks every length before it uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "control/rank_status.hpp"

namespace pypipe {

enum class CauseKind : std::uint32_t {
  error,      // an exception on `rank`
  interrupt,  // KeyboardInterrupt on `rank`
  timeout,    // `rank` waited too long
  left,       // `rank` needed a rank that had left
  lost,       // `rank` is gone; `seen_by` noticed it first
  link,       // a link of `rank` failed
  overdue,    // a transfer of `rank` did not end within `limit`
};

struct Cause {
  static constexpr std::int32_t unknown = -1;

  CauseKind kind = CauseKind::error;
  std::int32_t rank = 0;
  std::int32_t seen_by = unknown;
  std::int32_t stage = unknown;
  std::int32_t action_kind = unknown;  // ActionKind; known with its stage and microbatch, or not at all
  std::int32_t microbatch = unknown;
  std::uint64_t call = 0;  // the number of the call of step() or eval(), from 1; 0: in none
  bool trains = false;     // whether that call adds to gradients
  std::uint32_t ranks = 0;
  std::uint64_t limit = 0;  // nanoseconds
  std::string call_name;    // with its parentheses
  std::string doing;
  std::string type;  // of the exception
  std::string message;
  std::string traceback;
  std::vector<RankReport> reports;  // of the lost rank, or of all ranks when a transfer was overdue

  // At most abort_limit bytes: texts are clipped, and reports that find no room are left out.
  [[nodiscard]] std::string encode() const;

  // Throws Error{protocol} on bytes that encode() did not write.
  [[nodiscard]] static Cause decode(std::string_view bytes);
};

}  // namespace pypipe
