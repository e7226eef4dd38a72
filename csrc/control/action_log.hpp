// What one rank did last: a ring of its latest actions, in a file that outlives the process (its record).
//
// The file is anonymous memory, or lies in the folder where the user wants records. Its first part is mapped: a header
// and the ring. Behind that is room for the first cause, which is written once, with pwrite(). Neighbours on the same
// host get the descriptor, so they can tell what a rank did last even if it was killed or stopped.
//
// Protocol: one thread writes (the one that runs actions); any thread or process reads at any time, without a lock.
// Entry n is at index n % capacity.
//   writer   1. stores the fields of entry n (release)   2. cursor = n + 1 (release)
//            later stores `ready` and `end` of the entry in progress (release)
//   reader   1. c = cursor (acquire)   2. copies entries (acquire)   3. d = cursor (acquire)
//            keeps the entries n with d - capacity < n < c
// Entry n + capacity overwrites entry n only after cursor has become n + capacity. A reader that has seen any part of
// the new entry sees a cursor d >= n + capacity in step 3, and drops the entry.
//
// The log also tells a computing rank that the pipeline has failed: before each action, by a load and a branch.
//   a thread that aborts          1. stores the hub's cause and its flag (release)
//                                 2. failed_step_ = the step that failed (release)
//                                 3. rings the bells of waiting threads
//   the thread that runs actions  begin() and end() load failed_step_ (acquire), and throw Error{aborted} if it is at
//                                 most this rank's step
// So a thread that is stopped finds the cause in the hub. A thread that has passed the load runs one more action; if it
// has to wait there, its bell is rung after 1, and it sees the hub's flag (base/wait.hpp). A rank in a step before the
// one that failed continues until it would have to wait.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "control/rank_status.hpp"

namespace pypipe {

class ActionLog {
 public:
  // Keeps the latest `capacity` actions. `path`: the file to create; empty: anonymous memory.
  // Throws Error{system} if that fails.
  ActionLog(int rank, std::uint32_t capacity, const std::string& path);
  ~ActionLog();
  ActionLog(const ActionLog&) = delete;
  ActionLog& operator=(const ActionLog&) = delete;

  // By the one thread that runs actions.
  void step() noexcept;  // a step begins
  // Ends the action before it and begins one. Once this step or an earlier one has failed, only ends the action before
  // it, and throws Error{aborted}.
  void begin(std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch);
  void ready() noexcept;  // the action in progress has what it waited for
  void end();             // ends the action in progress, if any; throws as begin() does

  // For tracing, keeps a second copy of all actions from now on, up to `capacity`; later ones are lost.
  void start_trace(std::size_t capacity);
  [[nodiscard]] std::vector<ActionEntry> stop_trace();

  // By any thread.
  void set_busy(std::string_view work) noexcept;  // empty: no longer
  // The pipeline has failed: no action of `step` or a later step begins any more. Only the first cause counts. `cause`
  // is what Cause::encode() returns.
  void set_cause(std::string_view cause, std::uint64_t step = 0) noexcept;
  [[nodiscard]] RankStatus status() const noexcept;
  [[nodiscard]] std::vector<ActionEntry> actions() const;  // the oldest first; the last one may be in progress
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  // Removes the file: the pipeline has not failed, so there is nothing to look up.
  void discard() noexcept;

 private:
  struct Header;
  struct Entry;
  void finish(std::uint64_t now) noexcept;
  [[nodiscard]] bool has_failed() const noexcept { return failed_step_.load(std::memory_order_acquire) <= steps_; }
  [[noreturn]] static void stop();

  Fd descriptor_;
  std::string path_;
  int process_;
  std::size_t bytes_;
  Header* header_ = nullptr;
  Entry* entries_ = nullptr;
  static constexpr std::uint64_t never = ~std::uint64_t{0};
  std::atomic<std::uint64_t> failed_step_{never};
  bool in_progress_ = false;
  std::uint32_t steps_ = 0;
  std::size_t trace_capacity_ = 0;
  std::vector<ActionEntry> trace_;
  std::mutex busy_mutex_;
};

// What the rank of this record file was doing; nothing if it cannot be read. Reads and never maps the file, so that a
// shortened file cannot make this process fault.
[[nodiscard]] std::optional<RankStatus> status_in(int descriptor) noexcept;

// What a record file holds; its rank may still be writing to it.
struct RecordFile {
  std::uint32_t rank = 0;
  std::uint64_t clock = 0;  // nanoseconds to add to an entry's times for the time since the epoch
  std::vector<ActionEntry> actions;
  std::string busy;   // what the rank was busy with; empty: it was not
  std::string cause;  // as Cause::encode() returns it; empty: the pipeline had not failed
};

// Throws Error{system} if the file cannot be read, Error{protocol} if it is not a record of this version.
[[nodiscard]] RecordFile read_record(const std::string& path);

}  // namespace pypipe
