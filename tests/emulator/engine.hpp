// What everything shares: one lock, the knobs, the host's threads, the counters. The streams, communicators
// and the checker have files of their own.
//
// One mutex guards all state of a process's emulator. Bytes are moved, and delays are slept, without it.
// Whoever waits does so on the condition variable of what it waits for, and says what that is, for the report
// of a hang.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "access.hpp"
#include "captures.hpp"
#include "checker.hpp"
#include "clock.hpp"
#include "contexts.hpp"
#include "faults.hpp"
#include "knobs.hpp"
#include "memory.hpp"
#include "report.hpp"

namespace pypipe::emulator {

class Streams;
class Communicators;
struct Communicator;
using Lock = std::unique_lock<std::mutex>;

// What the host has waited for: one for all threads of the process, or (knob `threads`) one for each.
struct Timeline {
  Actor actor = 0;
  Clock clock;
  bool issues = false;  // somebody on it has enqueued something or accessed memory, not only asked
};

// A wait of a host thread, for the report of a hang.
struct HostWait {
  std::string thread;
  std::string what;
  Site site;
};

class Engine {
 public:
  Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() = delete;  // its threads run until the process ends

  [[nodiscard]] Actor new_actor() noexcept { return process_ | ++actors_; }
  [[nodiscard]] std::uint64_t next_sequence() noexcept { return ++sequences_; }
  [[nodiscard]] Random new_random();
  void reseed();  // knobs.seed has changed: all random sequences start anew
  [[nodiscard]] std::chrono::microseconds delay(Random& random) const;

  // The calling thread's, created at its first call with what all threads know then.
  Timeline& host();
  // The thread's clock as an operation that it issues now carries it; what the thread does later is not in
  // it.
  Clock issue();
  void join_threads();
  void join_all_threads(const Clock& clock);
  void forget(const std::shared_ptr<Timeline>& timeline);
  void host_access(const void* data, std::size_t bytes, bool write, const char* name);
  // Clocks that every future access is ordered after one of.
  [[nodiscard]] std::vector<const Clock*> horizon();

  // Of the calling thread, which need not be known as a host thread.
  [[nodiscard]] static std::string thread_name();
  // Blocks the calling host thread until ready().
  template <class Ready>
  void host_wait(Lock& lock, std::condition_variable& changed, const std::string& what, Ready ready);

  // A name that lives as long as the process.
  const char* intern(const std::string& text);

  std::mutex mutex;
  Knobs knobs;
  Reports reports;
  Checker checker;
  Memory memory;
  Faults faults;
  Streams& streams;
  Communicators& communicators;
  std::list<HostWait> host_waits;

  Contexts contexts;
  Captures captures;
  std::condition_variable resident_changed;  // rung when a device's `resident` or `launches` shrinks
  std::uint64_t progress = 0;                // completed operations, arrived frames, ended waits
  std::uint64_t completed = 0;
  std::uint64_t synchronizations = 0;
  bool exiting = false;

 private:
  const Actor process_;
  Actor actors_ = 0;
  std::uint64_t sequences_ = 0;
  std::uint64_t randoms_ = 0;
  std::uint64_t threads_ = 0;
  std::vector<std::shared_ptr<Timeline>> timelines_;
  Clock departed_;  // what ended threads knew: new ones and joins take it over
  std::map<std::string, std::unique_ptr<std::string>> names_;
};

Engine& engine();

// The exported function that this thread is in. Nested ones keep the outer one.
class Call {
 public:
  Call(const char* function, const void* caller) noexcept;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();
  [[nodiscard]] static Site site() noexcept;
  static void label(const char* label) noexcept;
  // What another thread does on behalf of a call is that call's.
  static void adopt(const Site& site) noexcept;

 private:
  bool outermost_;
};

template <class Ready>
void Engine::host_wait(Lock& lock, std::condition_variable& changed, const std::string& what, Ready ready) {
  if (ready()) return;
  const auto here = host_waits.insert(host_waits.end(), {thread_name(), what, Call::site()});
  changed.wait(lock, ready);
  host_waits.erase(here);
  ++progress;
}

}  // namespace pypipe::emulator
