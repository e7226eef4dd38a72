// Pairs of connected sockets, and hubs joined by them.
#pragma once

#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <utility>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "control/hub.hpp"

namespace pypipe::test {

inline std::pair<Fd, Fd> socket_pair() {
  std::array<int, 2> ends{};
  check_errno(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), "socketpair");
  return {Fd(ends[0]), Fd(ends[1])};
}

inline void join(Hub& left, Hub& right) {
  auto [here, there] = socket_pair();
  left.add_peer(right.rank(), std::move(here));
  right.add_peer(left.rank(), std::move(there));
}

// How many descriptors this process has open, including the one of this look.
inline std::size_t open_descriptors() {
  DIR* all = ::opendir("/proc/self/fd");
  if (all == nullptr) throw_errno("opendir");
  std::size_t count = 0;
  while (::readdir(all) != nullptr) count += 1;
  ::closedir(all);
  return count;
}

}  // namespace pypipe::test
