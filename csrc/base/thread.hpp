// Threads of the core's own.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace pypipe {

// Starts a thread that takes no signals: these belong to the threads of the host program. Throws std::system_error.
template <class Function>
[[nodiscard]] std::thread start_thread(Function&& function) {
  const struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    Blocked(const Blocked&) = delete;
    Blocked& operator=(const Blocked&) = delete;
    sigset_t before{};
  } blocked;  // a thread begins with the mask of the one that starts it
  return std::thread(std::forward<Function>(function));
}

}  // namespace pypipe
