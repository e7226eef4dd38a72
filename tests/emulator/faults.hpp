// Faults that a test asks for: control.h says which.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace pypipe::emulator {

enum class Injected { none, die, error, hang, size };

class Faults {
 public:
  static Faults of_environment();

  bool add(const std::string& specification);  // "kind@n[,kind@n...]"; false when it means nothing
  void clear() { planned_.clear(); }

  // Counts one send or receive; what is planned for it.
  Injected issued();
  [[nodiscard]] std::uint64_t operations() const noexcept { return operations_; }

 private:
  std::map<std::uint64_t, Injected> planned_;
  std::uint64_t operations_ = 0;
};

}  // namespace pypipe::emulator
