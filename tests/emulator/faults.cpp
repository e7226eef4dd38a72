#include "faults.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace pypipe::emulator {

bool Faults::add(const std::string& specification) {
  std::istringstream parts(specification);
  std::string part;
  while (std::getline(parts, part, ',')) {
    const std::size_t at = part.find('@');
    if (at == std::string::npos) return false;
    const std::string kind = part.substr(0, at);
    std::uint64_t number = 0;
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data() + at + 1, end, number);
    if (error != std::errc() || stop != end || number == 0) return false;
    if (kind == "die") {
      planned_[number] = Injected::die;
    } else if (kind == "error") {
      planned_[number] = Injected::error;
    } else if (kind == "hang") {
      planned_[number] = Injected::hang;
    } else if (kind == "size") {
      planned_[number] = Injected::size;
    } else {
      return false;
    }
  }
  return true;
}

Faults Faults::of_environment() {
  Faults faults;
  const char* value = std::getenv("PYPIPE_EMULATOR_FAULT");
  if (value != nullptr && !faults.add(value)) {
    std::fprintf(stderr, "pypipe emulator: PYPIPE_EMULATOR_FAULT=%s means nothing\n", value);
    std::_Exit(98);
  }
  return faults;
}

Injected Faults::issued() {
  const auto at = planned_.find(++operations_);
  return at == planned_.end() ? Injected::none : at->second;
}

}  // namespace pypipe::emulator
