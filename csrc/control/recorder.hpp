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

namespace pypipe {

// An action as the core knows it; what the kinds mean is the program's business.
struct Deed {
  std::uint32_t stage = 0;
  std::uint32_t kind = 0;
  std::uint32_t microbatch = 0;
  std::uint32_t step = 0;   // counts the steps of this rank, from 1
  std::uint64_t start = 0;  // nanoseconds of CLOCK_MONOTONIC
  std::uint64_t ready = 0;  // when it had what it waited for; 0: not yet, or nothing was waited for
  std::uint64_t end = 0;    // 0: in progress
};

// What a rank is doing. It travels as it is: both ends are the same version and byte order.
struct Activity {
  std::uint32_t rank = 0;
  std::uint32_t step = 0;       // the latest one begun; 0: none
  std::uint32_t running = 0;    // whether `now` is in progress
  std::uint32_t completed = 0;  // whether there is a `last`
  Deed now;                     // times are nanoseconds ago; 0: not yet
  Deed last;
  std::uint64_t busy = 0;    // nanoseconds since it said that it is busy with `work`; 0: it is not
  std::uint64_t worked = 0;  // nanoseconds since it last ended to be busy; 0: it never was
  std::array<char, 96> work{};
};
static_assert(std::is_trivially_copyable_v<Activity>);

[[nodiscard]] std::string to_json(const Activity& status);

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
  [[nodiscard]] std::vector<Deed> stop_trace();

  // By any thread.
  void set_busy(std::string_view work) noexcept;  // empty: no longer
  // The pipeline has failed: no action of that step, or a later one, begins from now on. The first cause counts.
  void set_cause(std::string_view cause, std::uint64_t step = 0) noexcept;
  [[nodiscard]] Activity activity() const noexcept;
  [[nodiscard]] std::vector<Deed> deeds() const;  // the oldest first; the last one may be in progress
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
  std::vector<Deed> trace_;
  std::mutex busy_mutex_;
};

// What the rank that owns this record file was doing; nothing where it cannot be read. Reads, never maps: whoever
// shortens the file does not make this process fault.
[[nodiscard]] std::optional<Activity> activity_in(int descriptor) noexcept;

}  // namespace pypipe
