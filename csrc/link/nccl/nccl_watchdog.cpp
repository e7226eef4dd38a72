#include "link/nccl/nccl_watchdog.hpp"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "control/cause.hpp"

namespace pypipe {
namespace {

constexpr std::chrono::milliseconds period{50};
constexpr std::chrono::seconds for_answers{1};

}  // namespace

NcclWatchdog::NcclWatchdog(Hub& hub, std::vector<std::shared_ptr<NcclEdge>> edges, std::chrono::nanoseconds limit,
                           std::size_t ranks)
    : hub_(hub), edges_(std::move(edges)), limit_(limit), ranks_(ranks) {
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
    try {
      look();
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a message; the next look may have it
    }
    lock.lock();
    wake_.wait_for(lock, period, [this] { return closing_; });
  }
}

void NcclWatchdog::look() {
  if (!hub_.has_failed()) {
    for (const auto& edge : edges_) {
      const std::optional<NcclEdge::Problem> problem = edge->watch(limit_);
      if (!problem) continue;
      if (problem->overdue && hub_.any_rank_is_busy(ranks_, limit_)) {
        edge->restart_timer();
        continue;
      }
      if (!problem->overdue) {
        Cause cause;
        cause.kind = CauseKind::link;
        cause.rank = hub_.rank();
        cause.message = problem->what;
        hub_.abort(cause);
        break;
      }
      const Cause cause = overdue(problem->what);
      if (!edge->watch(limit_)) continue;  // it ended while the ranks were asked
      hub_.abort(cause);
      break;
    }
  }
  if (hub_.has_failed()) {
    for (const auto& edge : edges_) edge->abort();
  }
}

Cause NcclWatchdog::overdue(const std::string& what) {
  WaitPolicy policy;
  policy.timeout = for_answers;
  Cause cause;
  cause.kind = CauseKind::overdue;
  cause.rank = hub_.rank();
  cause.ranks = static_cast<std::uint32_t>(ranks_);
  cause.limit = static_cast<std::uint64_t>(limit_.count());
  cause.message = what;
  cause.reports = hub_.ask(ranks_, policy);
  return cause;
}

void NcclWatchdog::close(const WaitPolicy& policy) {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (hub_.has_failed()) {
    for (const auto& edge : edges_) edge->abort();
    return;
  }
  // Ranks come here in any order, so each tells all its peers before it waits for any of them. The hub tells those that
  // still need this rank; they fail, and then there is nothing to wait for.
  hub_.leave();
  for (const auto& edge : edges_) edge->begin_close();
  const auto deadline = std::chrono::steady_clock::now() + policy.timeout;
  std::exception_ptr interrupted;
  for (const auto& edge : edges_) {
    WaitPolicy left = policy;
    left.interruption = [&] {  // what it throws ends the edge
      if (interrupted || hub_.has_failed()) throw Error(Fault::aborted, "the pipeline has failed");
      if (!policy.interruption) return;
      try {
        policy.interruption();
      } catch (...) {
        interrupted = std::current_exception();
        throw;
      }
    };
    left.timeout = std::max(deadline - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
    edge->end_close(left);
  }
  if (interrupted) std::rethrow_exception(interrupted);
}

}  // namespace pypipe
