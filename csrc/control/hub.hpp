// One control socket per pair of neighbours, and the thread that reads them all.
//
// Threads:
//   any thread      calls send(), take(), abort(), ask(), check(), leave(), close(), and what only reads
//   the hub thread  reads the sockets, sorts frames into inboxes, notices deaths, forwards aborts, rings bells,
//                   answers questions and forwards them
//
// A question (ask()) floods the pipeline: a hub that receives it for the first time answers the peer it came from and
// forwards it to its other peers; their answers take the same way back. A busy or deadlocked rank answers, since its
// hub thread does. A stopped one does not; the rank that asks then reads its record, if it has it. A hub thread drops
// an answer that it would have to wait to send. Questions are in hub_questions.cpp.
//
// A peer that has left (it sent a leave frame) sends no more messages, but it still forwards aborts and questions until
// its socket ends. That end does not count as a loss.
//
// `mutex_` guards inboxes, states and bells; each peer's `writing` mutex keeps its frames whole. The first cause is
// written once, before `failed_` is stored (release). No mutex is held during a call that blocks, except `writing`: its
// holder waits for the peer's hub thread to drain the socket, and that thread never waits for this rank's.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "base/wait.hpp"
#include "control/action_log.hpp"
#include "control/cause.hpp"
#include "control/frame.hpp"

namespace pypipe {

class Hub {
 public:
  explicit Hub(int rank);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  // Hands over a connected, authenticated stream socket. Only before start().
  void add_peer(int rank, Fd socket);

  // Starts the thread. Without it nothing is read.
  void start();

  // Sends one frame; `descriptor` travels with it (Unix sockets only) and stays the caller's.
  // Throws Error{peer_gone, aborted, timeout}.
  void send(int peer, FrameType type, std::uint32_t channel, std::uint64_t value, std::string_view payload,
            const WaitPolicy& policy, int descriptor = -1);

  // Waits for the next frame of this peer, type and channel. Throws Error{peer_gone, aborted, timeout}.
  [[nodiscard]] Frame take(int peer, FrameType type, std::uint32_t channel, const WaitPolicy& policy);

  // The same without waiting: nothing if no such frame has arrived.
  [[nodiscard]] std::optional<Frame> try_take(int peer, FrameType type, std::uint32_t channel);

  // Makes the pipeline fail everywhere: sets the first cause here and tells every neighbour, which tells its
  // own. A later cause is ignored. Never throws, and blocks for a moment at most.
  // `step`: the step that failed, as ActionLog counts them; 0: unknown. A rank that is computing stops before its next
  // action. A rank in an earlier step, which may still succeed, continues until it would have to wait.
  void abort(const Cause& cause, std::uint64_t step = 0) noexcept;

  // The first cause, once there is one.
  [[nodiscard]] std::optional<Cause> cause() const;

  // Whether there is one.
  [[nodiscard]] bool has_failed() const noexcept { return failed_.load(std::memory_order_acquire); }

  // Throws Error{aborted} when the pipeline has failed, Error{peer_gone} when `peer` has left.
  void check(int peer) const;

  // Where this rank records its actions; before start(). share_record() passes it to a peer on the same host.
  void set_action_log(std::shared_ptr<ActionLog> log);
  void share_record(int peer, const WaitPolicy& policy);

  // Asks all ranks what they are doing, and waits until `ranks` of them (including this one) have answered or the
  // timeout has passed. For a neighbour that does not answer, reports what its record says, with `silent` set.
  // Unordered.
  [[nodiscard]] std::vector<RankReport> ask(std::size_t ranks, const WaitPolicy& policy);

  // Whether a rank says that it is busy, or was busy less than `lately` ago. Waits half a second for answers.
  [[nodiscard]] bool any_rank_is_busy(std::size_t ranks, std::chrono::nanoseconds lately);

  // The peers that have left or are lost.
  [[nodiscard]] std::vector<int> departed() const;

  // Bells of waiting threads, to be rung when a peer leaves or the pipeline fails.
  void watch(Doorbell& bell);
  void unwatch(Doorbell& bell) noexcept;

  // Tells every peer that this rank sends no more messages. It continues to receive, and to forward aborts and questions.
  void leave() noexcept;

  // Leaves, if leave() has not been called, and joins the thread. Idempotent.
  void close() noexcept;

  // In a forked child: closes the sockets without a leave frame, so that peers notice when the parent dies.
  void abandon() noexcept;

  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  enum class State { present, left, lost };
  struct Waiting {
    std::size_t frames = 0;
    std::size_t bytes = 0;
    std::size_t descriptors = 0;
  };
  struct Peer {
    Fd socket;
    Waiting waiting;  // in the inboxes; guarded by `mutex_`
    std::mutex writing;
    bool torn = false;  // half a frame was written, and the rest will not follow; guarded by `writing`
    FrameReader reader;
    Fd record;  // the peer's record of its actions; guarded by `mutex_`
    std::atomic<State> state{State::present};
  };
  using InboxKey = std::tuple<int, FrameType, std::uint32_t>;

  [[nodiscard]] Peer& find(int peer) const;
  void run() noexcept;
  void read(int rank, Peer& peer);
  void dispatch(int rank, Peer& peer, Frame frame);
  void fail(std::string_view cause, std::uint64_t step, int except) noexcept;
  bool write(Peer& peer, std::span<const iovec> parts, int descriptor, std::chrono::steady_clock::time_point deadline,
             const std::function<bool()>& give_up);
  void tell(Peer& peer, FrameType type, std::uint64_t value, std::string_view payload) noexcept;
  void offer(Peer& peer, FrameType type, std::uint32_t channel, std::uint64_t value, std::string_view payload);
  void hear_question(int from, const Frame& frame);
  void hear_answer(const Frame& frame);
  [[nodiscard]] std::pair<Cause, std::uint64_t> lost_cause(int lost, std::string_view how);
  void ring_all() noexcept;

  Doorbell arrivals_;
  const int rank_;
  Fd wake_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::thread thread_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string cause_;  // encoded
  std::uint64_t cause_step_ = 0;
  std::map<InboxKey, std::deque<Frame>> inboxes_;
  std::vector<Doorbell*> bells_;
  std::shared_ptr<ActionLog> action_log_;
  struct Question {
    std::uint64_t number = 0;
    int from = -1;
  };
  std::map<std::uint32_t, Question>
      questions_;               // the latest question of each rank that asks; only the hub thread uses it
  std::mutex asking_;           // one question of this rank at a time
  std::uint64_t question_ = 0;  // this rank's latest; guarded by `mutex_`, as are its answers
  std::map<std::uint32_t, RankStatus> answers_;
};

}  // namespace pypipe
