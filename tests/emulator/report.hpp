// Hazards: counted, printed, written to a file.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace pypipe::emulator {

class Reports {
 public:
  // Counts a hazard and prints it (of each kind the first 20 only). Under the engine's lock.
  void hazard(const std::string& kind, const std::string& text);
  // Prints something that is no hazard: an injected fault.
  void note(const std::string& text);

  [[nodiscard]] std::uint64_t count(const char* kind) const;
  [[nodiscard]] const std::string& last() const noexcept { return last_; }
  void reset() { counts_.clear(); }

 private:
  std::map<std::string, std::uint64_t> counts_;
  std::string last_;
};

}  // namespace pypipe::emulator
