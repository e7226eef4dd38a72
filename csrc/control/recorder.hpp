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
  void step() noexcept;                                                                    // a step begins
  void begin(std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch) noexcept;  // ends the one before it
  void ready() noexcept;  // the action in progress waits no longer
  void end() noexcept;    // ends the action in progress, if there is one

  // A second, larger copy of what is done from now on, for tracing: at most `capacity` actions; what comes then is lost.
  void start_trace(std::size_t capacity);
  [[nodiscard]] std::vector<Deed> stop_trace();

  // By any thread.
  void set_busy(std::string_view work) noexcept;  // empty: no longer
  void set_cause(std::string_view cause) noexcept;
  [[nodiscard]] Activity activity() const noexcept;
  [[nodiscard]] std::vector<Deed> deeds() const;  // the oldest first; the last one may be in progress
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
  // Removes the file: nothing happened that anybody would look it up for.
  void discard() noexcept;

 private:
  struct Header;
  struct Entry;
  void finish(std::uint64_t now) noexcept;

  Fd descriptor_;
  std::string path_;
  int process_;
  std::size_t bytes_;
  Header* header_ = nullptr;
  Entry* entries_ = nullptr;
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
