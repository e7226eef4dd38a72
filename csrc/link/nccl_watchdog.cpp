#include "link/nccl_watchdog.hpp"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <optional>
#include <string>
#include <utility>

#include "base/json.hpp"

namespace pypipe {
namespace {

constexpr std::chrono::milliseconds period{50};

}  // namespace

NcclWatchdog::NcclWatchdog(Hub& hub, std::vector<std::shared_ptr<NcclEdge>> edges, std::chrono::nanoseconds limit)
    : hub_(hub), edges_(std::move(edges)), limit_(limit) {
  // Signals belong to the threads of the host program.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

NcclWatchdog::~NcclWatchdog() {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void NcclWatchdog::run() noexcept {
  pthread_setname_np(pthread_self(), "pypipe-nccl");
  std::unique_lock lock(mutex_);
  while (!closing_) {
    lock.unlock();
    look();
    lock.lock();
    wake_.wait_for(lock, period, [this] { return closing_; });
  }
}

void NcclWatchdog::look() noexcept {
  if (!hub_.cause()) {
    for (const auto& edge : edges_) {
      const std::optional<std::string> trouble = edge->watch(limit_);
      if (!trouble) continue;
      hub_.abort(R"({"kind":"link","rank":)" + std::to_string(hub_.rank()) + R"(,"message":)" + quoted(*trouble) + "}");
      break;
    }
  }
  if (hub_.cause()) {
    for (const auto& edge : edges_) edge->abort();
  }
}

void NcclWatchdog::close(const Patience& patience) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (hub_.cause()) {
    for (const auto& edge : edges_) edge->abort();
    return;
  }
  // In whatever order the ranks come here: each tells all its peers before it waits for any.
  for (const auto& edge : edges_) edge->begin_close();
  const auto deadline = std::chrono::steady_clock::now() + patience.timeout;
  for (const auto& edge : edges_) {
    Patience left = patience;
    left.timeout = std::max(deadline - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
    edge->end_close(left);
  }
}

}  // namespace pypipe
