// Streams: queues of operations, each on a thread of its own, and what can lie in them; events.
//
// Who does what: a host thread appends to `queue` under the engine's lock and rings `changed`; only the
// stream's thread takes from it, runs the operation, and sets `clock`. An operation is done when `completed`
// passes its number. Handles are numbers that are never used again, so that a destroyed one is recognized.
//
// Stream 0 is the host itself: what is recorded on it has happened already, and its wait for an event blocks
// the calling thread. That is how compute on the CPU stands in for a stream of compute kernels. With the knob
// default_stream it is a queue like the others, one for each device; all its names mean the same one.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "access.hpp"
#include "engine.hpp"
#include "link/nccl/cuda_abi.hpp"

namespace pypipe::emulator {

struct Stream;

// One cuEventRecord. A wait takes the latest one when it is issued and keeps it; recording again makes a new
// one.
struct Record {
  bool done = false;
  Clock clock;
  std::string where;
  std::condition_variable changed;
};

struct Event {
  int device = 0;
  std::shared_ptr<Capture> capture;  // in which it was recorded last, if in any
  cuda::StreamHandle captured_on = nullptr;
  std::shared_ptr<Record> latest;  // none: never recorded, so nothing to wait for
};

// Where an operation comes from: the call, and what its thread knew then.
struct Issue {
  Site site;
  Clock clock;
  static Issue now() { return {Call::site(), engine().issue()}; }
};

class Operation {
 public:
  Operation(const char* name, const Issue& issue);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // On the stream's thread, with the lock, which it may release for a while.
  virtual void run(Stream& stream, Lock& lock) = 0;
  [[nodiscard]] virtual std::string describe() const;

  const char* name;
  Site site;
  std::uint64_t sequence;
  Clock issued;                  // what the issuing thread knew
  std::uint64_t connection = 0;  // its hardware queue, from 1; 0: none
};

struct Stream {
  // Waits on the stream's thread; what for is in the report of a hang.
  template <class Describe, class Ready>
  void wait(Lock& lock, std::condition_variable& condition, Describe describe_wait, Ready ready) {
    if (ready()) return;
    waits_for = describe_wait();
    condition.wait(lock, ready);
    waits_for.clear();
  }

  cuda::StreamHandle handle = nullptr;
  std::string name;
  std::uint64_t number = 0;
  int device = 0;
  std::shared_ptr<Capture> capture;  // while it is being captured
  Actor actor = 0;
  Clock clock;
  Random random;
  std::deque<std::unique_ptr<Operation>> queue;
  Operation* current = nullptr;
  std::string waits_for;
  std::uint64_t issued = 0;
  std::uint64_t completed = 0;
  bool destroyed = false;
  int deferred = 0;  // operations that unfinished non-blocking calls will still append
  std::condition_variable changed;
};

class Streams {
 public:
  [[nodiscard]] cuda::StreamHandle create();
  bool destroy(cuda::StreamHandle handle);
  // Null for a handle that is none, which is reported.
  [[nodiscard]] std::shared_ptr<Stream> find(cuda::StreamHandle handle);
  // Stream 0 by any of its names (null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD), where it is the host.
  [[nodiscard]] static bool is_host(cuda::StreamHandle handle) noexcept;

  static void append(Stream& stream, std::unique_ptr<Operation> operation);

  [[nodiscard]] cuda::EventHandle create_event();
  bool destroy_event(cuda::EventHandle handle);
  [[nodiscard]] std::shared_ptr<Event> find_event(cuda::EventHandle handle);

  // A record on a stream, and a stream's wait for one.
  static std::shared_ptr<Record> record(Stream& stream, const Issue& issue);
  static void wait(Stream& stream, const std::shared_ptr<Record>& record, const Issue& issue);
  static void host_record(Event& event);
  // Waits for everything that was issued to the stream.
  static void synchronize(Lock& lock, Stream& stream);
  // Waits for everything that was issued to the device; `orders`: and knows of it, for the checker.
  void synchronize_device(Lock& lock, int device, bool orders);
  // A kernel of this kind is launched; with lazy loading the first of its kind waits for the device.
  void load(Lock& lock, int device, const char* kind);
  // Reports that a record or a synchronization misses what a non-blocking call in progress has yet to append.
  static void note_deferred(const Stream& stream);

  [[nodiscard]] std::vector<const Clock*> busy_clocks() const;
  [[nodiscard]] std::string describe() const;  // of each stream, what it does and waits for
  [[nodiscard]] bool waiting() const;
  void reseed();
  void leave_capture(const Capture& capture);

  // With knobs.connections: an operation starts only when all earlier ones of its hardware queue have
  // started.
  void expect_connection(const Stream& stream, Operation& operation);
  void enter_connection(Stream& stream, const Operation& operation, Lock& lock);
  void leave_connection(const Operation& operation);

 private:
  void work(const std::shared_ptr<Stream>& stream);
  std::shared_ptr<Stream> make(const std::string& name);

  std::map<cuda::StreamHandle, std::shared_ptr<Stream>> streams_;  // also destroyed ones that are not done
  std::map<int, std::shared_ptr<Stream>> defaults_;                // by device, with the knob default_stream
  std::map<cuda::EventHandle, std::shared_ptr<Event>> events_;
  std::uint64_t handles_ = 0;
  std::uint64_t created_ = 0;
  std::set<std::pair<int, std::string>> loaded_;
  std::map<std::uint64_t, std::set<std::uint64_t>> connections_;  // sequences that have not started
  std::condition_variable connections_changed_;
};

// An access that an operation makes now.
void happen(Stream& stream, Access& access);

// A place on the device, which holds knobs.resident operations at once.
void take_place(Stream& stream, Lock& lock);
void give_place(const Stream& stream);

// Memory that one operation moves to other memory.
class CopyOperation final : public Operation {
 public:
  CopyOperation(void* target, const void* source, std::size_t bytes, const std::string& where);
  ~CopyOperation() override;
  void run(Stream& stream, Lock& lock) override;

 private:
  Buffer target_;
  Buffer source_;
};

// A kernel that a test launches, or an access that compute announces.
class LaunchOperation final : public Operation {
 public:
  LaunchOperation(const char* name, void (*function)(void*), void* argument, std::vector<Access> accesses);
  void run(Stream& stream, Lock& lock) override;

 private:
  void (*function_)(void*);
  void* argument_;
  std::vector<Access> accesses_;
};

}  // namespace pypipe::emulator
