// What each rank is doing: questions that flood the pipeline, their answers, and the records of silent ranks.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "control/hub.hpp"

namespace pypipe {
namespace {

constexpr std::size_t most_ranks = 1 << 16;       // whose questions and answers are accepted
constexpr std::chrono::milliseconds moment{500};  // for a question that must not hold up the rank that asks

}  // namespace

void Hub::set_action_log(std::shared_ptr<ActionLog> log) {
  if (thread_.joinable() || closing_) throw Error(Fault::usage, "set_action_log() after start()");
  action_log_ = std::move(log);
}

void Hub::share_record(int peer, const WaitPolicy& policy) {
  if (action_log_) send(peer, FrameType::record, 0, 0, {}, policy, action_log_->descriptor());
}

std::vector<RankReport> Hub::ask(std::size_t ranks, const WaitPolicy& policy) {
  const std::scoped_lock turn(asking_);
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    answers_.clear();
    number = ++question_;
  }
  const auto me = static_cast<std::uint32_t>(rank_);
  for (auto& [rank, peer] : peers_) offer(*peer, FrameType::ask, me, number, {});
  const auto enough = [&] {
    if (failed_.load(std::memory_order_acquire)) return true;  // ranks leave now, and the cause tells more
    const std::scoped_lock lock(mutex_);
    return answers_.size() + 1 >= ranks;
  };
  (void)await(arrivals_, policy, enough, [] {});
  std::vector<RankReport> all;
  if (action_log_) all.push_back({action_log_->status()});
  const std::scoped_lock lock(mutex_);
  for (const auto& [rank, status] : answers_) all.push_back({status});
  for (const auto& [rank, peer] : peers_) {
    if (answers_.contains(static_cast<std::uint32_t>(rank)) || !peer->record) continue;
    if (const auto status = status_in(peer->record.get())) all.push_back({*status, 1});
  }
  question_ += 1;  // later answers are ignored
  return all;
}

bool Hub::any_rank_is_busy(std::size_t ranks, std::chrono::nanoseconds lately) {
  WaitPolicy policy;
  policy.timeout = moment;
  const std::vector<RankReport> all = ask(ranks, policy);
  return std::any_of(all.begin(), all.end(), [&](const RankReport& report) {
    const RankStatus& status = report.status;
    const bool was = status.busy_ended != 0 && std::cmp_less(status.busy_ended, lately.count());
    return report.silent == 0 && (status.busy != 0 || was);
  });
}

void Hub::hear_question(int from, const Frame& frame) {
  if (frame.channel == static_cast<std::uint32_t>(rank_)) return;  // this rank's own question came back
  Question& latest = questions_[frame.channel];
  if (questions_.size() > most_ranks) throw Error(Fault::protocol, "it asks for more ranks than there can be");
  if (frame.value <= latest.number) return;
  latest = {frame.value, from};
  if (action_log_) {
    const RankStatus status = action_log_->status();
    offer(*peers_.at(from), FrameType::answer, frame.channel, frame.value,
          std::string_view(reinterpret_cast<const char*>(&status), sizeof(status)));
  }
  for (auto& [rank, peer] : peers_) {
    if (rank != from) offer(*peer, FrameType::ask, frame.channel, frame.value, {});
  }
}

void Hub::hear_answer(const Frame& frame) {
  if (frame.channel != static_cast<std::uint32_t>(rank_)) {
    const auto question = questions_.find(frame.channel);
    if (question == questions_.end() || question->second.number != frame.value) return;
    offer(*peers_.at(question->second.from), FrameType::answer, frame.channel, frame.value, frame.payload);
    return;
  }
  RankStatus status;
  if (frame.payload.size() != sizeof(status)) throw Error(Fault::protocol, "an answer of the wrong length");
  std::memcpy(&status, frame.payload.data(), sizeof(status));
  status.work.back() = '\0';
  {
    const std::scoped_lock lock(mutex_);
    if (frame.value != question_ || status.rank >= most_ranks) return;
    answers_[status.rank] = status;
  }
  notify(arrivals_);
}

// The cause, with what the peer did last if its record is here, which outlives the peer; and the step that it was in or
// would have begun next.
std::pair<Cause, std::uint64_t> Hub::lost_cause(int lost, std::string_view how) {
  Cause cause;
  cause.kind = CauseKind::lost;
  cause.rank = lost;
  cause.seen_by = rank_;
  cause.message = how;
  std::uint64_t step = 0;
  const std::scoped_lock lock(mutex_);
  if (const Fd& record = peers_.at(lost)->record) {
    if (const auto status = status_in(record.get())) {
      cause.reports.push_back({*status, 1});
      step = std::uint64_t{status->step} + (status->running != 0 ? 0 : 1);
    }
  }
  return {std::move(cause), step};
}

}  // namespace pypipe
