// A call that may block without limit, such as one of NCCL's, for as long as its caller is willing to wait.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "base/wait.hpp"

namespace pypipe {

// The call runs on a thread of its own, which no signal reaches. It owns all that it uses, since where it does not
// return in time it is left to itself. One thread waits.
class BoundedCall {
 public:
  // Throws Error{system} where there is no thread to be had.
  explicit BoundedCall(std::function<void()> call);

  // Waits until the call has returned, and throws what it threw. Throws Error{timeout} that names `what`, and what
  // `policy.interruption` throws.
  void wait(const WaitPolicy& policy, const std::string& what);

  [[nodiscard]] bool ended() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace pypipe
