// What one rank did last: a ring of its latest actions, in a file that outlives the process.
//
// The file is anonymous memory, or lies where the user wants records kept. Its first part is mapped: a header and the
// ring. Behind that lies room for the first cause, which is written once, with pwrite(). Neighbours on the same host
// get the descriptor, and so can say what a rank did last even when it was killed or stopped.
//
// Protocol: one thread writes (the one that runs actions); any thread or process reads, whenever it likes, without a
// lock. Entry n lies in place n % capacity.
//   writer   1. stores the fields of entry n (release)   2. cursor = n + 1 (release)
//            later stores `ready` and `end` of the entry in progress (release)
//   reader   1. c = cursor (acquire)   2. copies entries (acquire)   3. d = cursor (acquire)
//            keeps the entries n with d - capacity < n < c
// Place n % capacity is overwritten for entry n + capacity only after cursor has become n + capacity. A reader that
// has seen any part of that sees a cursor d >= n + capacity in step 3, and drops the entry.
//
// The recorder is also where a rank that runs hears of a failure elsewhere: before each action, by a load and a branch.
//   hub thread, or any that aborts   1. stores the hub's cause and the hub's flag (release)
//                                    2. failed_step_ = the step that failed (release)
//                                    3. rings the bells of those that wait
//   the thread that runs actions     begin() and end(): failed_step_ (acquire); if it is the own step's number or less,
//                                    Error{aborted}
// So the thread that is stopped finds the cause with the hub. One that has passed the load does one more action; if it
// has to wait there, its bell is rung after 1, and it looks at the hub's flag (base/wait.hpp). One that is in an earlier
// step than the one that failed also goes on, until it would have to wait.
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

class Recorder {
 public:
  // Keeps the latest `capacity` actions. `path`: where the file is made; empty: anonymous memory.
  // Throws Error{system} where that cannot be.
  Recorder(int rank, std::uint32_t capacity, const std::string& path);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // By the one thread that runs actions.
  void step() noexcept;  // a step begins
  // Ends the action before it. Once this step, or one before it, has failed: only that, and throws Error{aborted}.
  void begin(std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch);
  void ready() noexcept;  // the action in progress waits no longer
  void end();             // ends the action in progress, if there is one; throws as begin() does

  // A second, larger copy of what is done from now on, for tracing: at most `capacity` actions; what comes then is lost.
  void start_trace(std::size_t capacity);
  [[nodiscard]] std::vector<ActionEntry> stop_trace();

  // By any thread.
  void set_busy(std::string_view work) noexcept;  // empty: no longer
  // The pipeline has failed: no action of that step, or a later one, begins from now on. The first cause counts; it is
  // given as Cause::encode() writes it.
  void set_cause(std::string_view cause, std::uint64_t step = 0) noexcept;
  [[nodiscard]] RankStatus status() const noexcept;
  [[nodiscard]] std::vector<ActionEntry> actions() const;  // the oldest first; the last one may be in progress
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  // Removes the file: nothing happened that anybody would look it up for.
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

// What the rank that owns this record file was doing; nothing where it cannot be read. Reads, never maps: a file that is
// shortened does not make this process fault.
[[nodiscard]] std::optional<RankStatus> status_in(int descriptor) noexcept;

// A record file, as its rank left it or while it still writes.
struct RecordFile {
  std::uint32_t rank = 0;
  std::uint64_t clock = 0;  // nanoseconds to add to an entry's times for the time since the epoch
  std::vector<ActionEntry> actions;
  std::string busy;   // empty: it was not
  std::string cause;  // as Cause::encode() writes it; empty: none
};

// Throws Error{system} where the file cannot be read, Error{protocol} where it is not a record of this version.
[[nodiscard]] RecordFile read_record(const std::string& path);

}  // namespace pypipe
