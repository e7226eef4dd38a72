#include "link/nccl/nccl_watchdog.hpp"

#include <pthread.h>

#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "control/cause.hpp"

namespace pypipe {
namespace {

constexpr std::chrono::milliseconds period{50};
constexpr std::chrono::seconds for_answers{1};
constexpr std::chrono::seconds for_abort{10};  // after which it goes on by itself

}  // namespace

NcclWatchdog::NcclWatchdog(Hub& hub, std::shared_ptr<NcclEdges> edges, std::chrono::nanoseconds limit,
                           std::size_t ranks)
    : hub_(hub), edges_(std::move(edges)), limit_(limit), ranks_(ranks) {
  thread_ = start_thread([this] { run(); });
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
  std::optional<cuda::Current> current;
  try {
    current.emplace(edges_->gpu());
    // A query by a thread in another mode invalidates whatever a thread of the script captures as a CUDA graph.
    cuda::CaptureMode mode = cuda::CaptureMode::relaxed;
    edges_->gpu().api()->check(edges_->gpu().api()->exchange_capture_mode(&mode));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): what it asks from now on fails, and is told
  }
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
    for (const auto& edge : edges_->all()) {
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
  if (hub_.has_failed() && !aborted_) {
    aborted_ = true;
    edges_->abort(for_abort);
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
    if (!aborted_) edges_->abort(for_abort);
    return;
  }
  // Ranks come here in any order, so each tells all its peers before it waits for any of them. The hub tells those that
  // still need this rank; they fail, and then there is nothing to wait for.
  hub_.leave();
  std::exception_ptr interrupted;
  WaitPolicy listening = policy;
  listening.prolong = nullptr;
  listening.interruption = [&] {  // what it throws ends the edges
    if (hub_.has_failed()) throw Error(Fault::aborted, "the pipeline has failed");
    if (!policy.interruption) return;
    try {
      policy.interruption();
    } catch (...) {
      interrupted = std::current_exception();
      throw;
    }
  };
  try {
    edges_->close(listening);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): they are aborted, and all peers have been told already
  } catch (...) {
    if (!interrupted) throw;
  }
  if (interrupted) std::rethrow_exception(interrupted);
}

}  // namespace pypipe
