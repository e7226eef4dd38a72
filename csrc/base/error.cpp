#include "base/error.hpp"

#include <cerrno>
#include <system_error>

namespace pypipe {

const char* name(Fault fault) noexcept {
  switch (fault) {
    case Fault::usage:
      return "usage";
    case Fault::system:
      return "system";
    case Fault::protocol:
      return "protocol";
    case Fault::mismatch:
      return "mismatch";
    case Fault::timeout:
      return "timeout";
    case Fault::peer_gone:
      return "peer_gone";
    case Fault::aborted:
      return "aborted";
  }
  return "unknown";
}

void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error(Fault::system, what + ": " + std::generic_category().message(code));
}

}  // namespace pypipe
