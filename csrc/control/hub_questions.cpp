// What each rank is doing: questions that flood the pipeline, their answers, and the records of those that are silent.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "control/hub.hpp"

namespace pypipe {
namespace {

constexpr std::size_t most_ranks = 1 << 16;       // that are believed to ask or to answer
constexpr std::chrono::milliseconds moment{500};  // for a question that nobody shall notice

}  // namespace

void Hub::set_recorder(std::shared_ptr<Recorder> recorder) {
  if (thread_.joinable() || closing_) throw Error(Fault::usage, "set_recorder() after start()");
  recorder_ = std::move(recorder);
}

void Hub::share_record(int peer, const Patience& patience) {
  if (recorder_) send(peer, FrameType::record, 0, 0, {}, patience, recorder_->descriptor());
}

std::vector<RankReport> Hub::ask(std::size_t ranks, const Patience& patience) {
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
    if (failed_.load(std::memory_order_acquire)) return true;  // ranks leave now, and the cause says more
    const std::scoped_lock lock(mutex_);
    return answers_.size() + 1 >= ranks;
  };
  (void)await(arrivals_, patience, enough, [] {});
  std::vector<RankReport> all;
  if (recorder_) all.push_back({recorder_->status()});
  const std::scoped_lock lock(mutex_);
  for (const auto& [rank, status] : answers_) all.push_back({status});
  for (const auto& [rank, peer] : peers_) {
    if (answers_.contains(static_cast<std::uint32_t>(rank)) || !peer->record) continue;
    if (const auto status = status_in(peer->record.get())) all.push_back({*status, 1});
  }
  question_ += 1;  // answers that come now are too late
  return all;
}

bool Hub::any_rank_is_busy(std::size_t ranks, std::chrono::nanoseconds lately) {
  Patience patience;
  patience.timeout = moment;
  const std::vector<RankReport> all = ask(ranks, patience);
  return std::any_of(all.begin(), all.end(), [&](const RankReport& report) {
    const RankStatus& status = report.status;
    const bool was = status.busy_ended != 0 && std::cmp_less(status.busy_ended, lately.count());
    return report.silent == 0 && (status.busy != 0 || was);
  });
}

void Hub::hear_question(int from, const Frame& frame) {
  if (frame.channel == static_cast<std::uint32_t>(rank_)) return;  // this rank's own, come round
  Question& latest = questions_[frame.channel];
  if (questions_.size() > most_ranks) throw Error(Fault::protocol, "it asks for more ranks than there can be");
  if (frame.value <= latest.number) return;
  latest = {frame.value, from};
  if (recorder_) {
    const RankStatus status = recorder_->status();
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
  if (frame.payload.size() != sizeof(status)) throw Error(Fault::protocol, "an answer of a wrong length");
  std::memcpy(&status, frame.payload.data(), sizeof(status));
  status.work.back() = '\0';
  {
    const std::scoped_lock lock(mutex_);
    if (frame.value != question_ || status.rank >= most_ranks) return;
    answers_[status.rank] = status;
  }
  notify(arrivals_);
}

// With what the peer did last, where its record is at hand: that outlives it. And the step that it was in, or that it
// won't come to.
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
