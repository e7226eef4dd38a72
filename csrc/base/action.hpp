// The kinds of actions, and their names for errors.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace pypipe {

// The same as Kind in pypipe/program/actions.py, name by name and number by number; tests/core/test_action_kinds.py
// compares the two. The program's modules import nothing of the core, so neither is made from the other.
enum class ActionKind : std::uint32_t {
  F,
  B,
  I,
  W,
  SEND_F,
  RECV_F,
  SEND_B,
  RECV_B,
  UNSHARD,
  RESHARD,
  REDUCE_GRAD,
};

// By number.
inline constexpr std::array action_kind_names{"F",      "B",      "I",       "W",       "SEND_F",     "RECV_F",
                                              "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};
static_assert(action_kind_names.size() == static_cast<std::size_t>(ActionKind::REDUCE_GRAD) + 1);

// A peer's `kind` may not be one of these: then it is "(kind 77)".
[[nodiscard]] inline std::string kind_name(std::uint32_t kind) {
  return kind < action_kind_names.size() ? action_kind_names[kind] : "(kind " + std::to_string(kind) + ")";
}

}  // namespace pypipe
