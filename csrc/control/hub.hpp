// One control socket per pair of neighbours, and the thread that reads them all.
//
// Who does what:
//   any thread      send(), take(), abort(), ask(), check(), leave(), close(), and what only reads
//   the hub thread  reads sockets, sorts frames into inboxes, notices deaths, passes aborts on, rings bells,
//                   answers questions and passes them on
//
// A question (ask()) floods the pipeline: a hub that hears it for the first time answers to the peer it came from, and
// passes it on to its other peers; their answers go back the way the question came. A rank that is busy or deadlocked
// answers, since its hub thread does; one that is stopped does not, and who asks reads its record where it can.
// A hub thread gives up an answer rather than wait: nobody waits for it longer than he said he would. Questions are in
// hub_questions.cpp.
//
// A peer that has said goodbye sends no more messages, but it still hears and passes on aborts and questions, until its
// socket ends, which then is no loss.
//
// `mutex_` guards inboxes, states and bells; each peer's `writing` mutex keeps its frames whole. The first
// cause is written once, before `failed_` is stored (release). No mutex is held while a call blocks, except
// `writing`, whose holder waits for the peer's hub thread to drain the socket, and that thread never waits
// for this rank's.
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
#include "control/cause.hpp"
#include "control/frame.hpp"
#include "control/recorder.hpp"

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
            const Patience& patience, int descriptor = -1);

  // Waits for the next frame of this peer, type and channel. Throws Error{peer_gone, aborted, timeout}.
  [[nodiscard]] Frame take(int peer, FrameType type, std::uint32_t channel, const Patience& patience);

  // The same without waiting: nothing where none has come.
  [[nodiscard]] std::optional<Frame> try_take(int peer, FrameType type, std::uint32_t channel);

  // Makes the pipeline fail everywhere: sets the first cause here and tells every neighbour, which tells its
  // own. A later cause is ignored. Never throws and never blocks for more than a moment.
  // `step`: the one that failed, counted as recorders count. A rank that runs stops before its next action; one that is
  // in an earlier step still, of which all may be well, goes on until it would have to wait. 0: known of no step.
  void abort(const Cause& cause, std::uint64_t step = 0) noexcept;

  // The first cause, once there is one.
  [[nodiscard]] std::optional<Cause> cause() const;

  // Whether there is one.
  [[nodiscard]] bool has_failed() const noexcept { return failed_.load(std::memory_order_acquire); }

  // Throws Error{aborted} when the pipeline has failed, Error{peer_gone} when `peer` has left.
  void check(int peer) const;

  // Where this rank notes what it does; before start(). Peers on the same host are handed it by share_record().
  void set_recorder(std::shared_ptr<Recorder> recorder);
  void share_record(int peer, const Patience& patience);

  // Asks all ranks what they do; waits until `ranks` of them have answered (this one counts), at most `patience`.
  // A neighbour that does not answer may be known from its record: then its `silent` is set. Unordered.
  [[nodiscard]] std::vector<RankReport> ask(std::size_t ranks, const Patience& patience);

  // Whether a rank that answers within a moment says that it is busy, or was so less than `lately` ago.
  [[nodiscard]] bool any_rank_is_busy(std::size_t ranks, std::chrono::nanoseconds lately);

  // The peers that have said goodbye or are gone.
  [[nodiscard]] std::vector<int> departed() const;

  // Bells of waiting threads, to be rung when a peer leaves or the pipeline fails.
  void watch(Doorbell& bell);
  void unwatch(Doorbell& bell) noexcept;

  // Says goodbye to every peer: no message will come any more, but those that were sent before. This rank goes on to
  // hear them, and to pass on what they say.
  void leave() noexcept;

  // Says goodbye (once more) and joins the thread. Idempotent.
  void close() noexcept;

  // In a forked child: gives up the sockets without a word, so that the parent's death is seen by its peers.
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
    bool torn = false;  // half a frame was written, and the rest never will be; guarded by `writing`
    FrameReader reader;
    Fd record;  // where the peer notes what it does; guarded by `mutex_`
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
  std::shared_ptr<Recorder> recorder_;
  struct Question {
    std::uint64_t number = 0;
    int from = -1;
  };
  std::map<std::uint32_t, Question> questions_;  // by the rank that asks, its latest; used by the hub thread alone
  std::mutex asking_;                            // one question of this rank at a time
  std::uint64_t question_ = 0;                   // this rank's latest; guarded by `mutex_`, as are its answers
  std::map<std::uint32_t, RankStatus> answers_;
};

}  // namespace pypipe
