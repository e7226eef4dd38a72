// The one exception type of the core, and the checks that throw it.
#pragma once

#include <stdexcept>
#include <string>

namespace pypipe {

// What went wrong. Callers decide by it; the text is for people.
enum class Fault {
  usage,      // the caller broke the contract of a function
  system,     // the operating system refused something
  protocol,   // a peer sent bytes that are not valid
  mismatch,   // a peer sent something other than what this rank expected
  timeout,    // a deadline passed
  peer_gone,  // a peer closed its end or died
  aborted,    // the pipeline has failed; the hub knows the first cause
};

const char* name(Fault fault) noexcept;

class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& message) : std::runtime_error(message), fault_(fault) {}
  [[nodiscard]] Fault fault() const noexcept { return fault_; }

 private:
  Fault fault_;
};

// Throws Error{system} with `what` and the text of errno.
[[noreturn]] void throw_errno(const std::string& what);

// Returns `result`, or throws Error{system} when it is negative (the convention of system calls).
template <class Integer>
Integer check_errno(Integer result, const char* what) {
  if (result < 0) throw_errno(what);
  return result;
}

}  // namespace pypipe
