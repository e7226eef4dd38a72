// The happens-before checker: which access to which bytes came last, and whether the next one is ordered
// after it.
//
// Two accesses to the same byte, one of which writes, are a race unless the clock of the later-executed one
// covers the epoch of the other. That does not depend on how the delays fell: unordered accesses are found in
// whichever order they ran. Host threads among themselves are not judged: their locks can't be seen from
// here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "access.hpp"

namespace pypipe::emulator {

class Checker {
 public:
  // Reports what races with the access, and remembers it. `clock` is what its actor knows; it covers
  // access.epoch.
  void access(const Access& access, const Clock& clock);

  // Two accesses of one operation, which has no order inside.
  static void together(const std::vector<Access>& accesses);

  [[nodiscard]] std::size_t nodes() const noexcept { return nodes_.size(); }

 private:
  using Known = std::shared_ptr<const Access>;
  struct Node {  // of the bytes from its key to `end`
    std::uintptr_t end = 0;
    Known write;
    std::vector<Known> reads;  // since then, one per actor at most
  };
  using Nodes = std::map<std::uintptr_t, Node>;

  void split(std::uintptr_t at);
  void forget();

  Nodes nodes_;
  std::size_t forget_at_ = 4096;
};

}  // namespace pypipe::emulator
