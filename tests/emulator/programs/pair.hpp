// What the programs share: two processes that are the two ranks, and the calls in as few words as possible.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "abi.hpp"
#include "control.h"

namespace pypipe::test {

[[noreturn]] void fail(const std::string& what);
inline void check(bool holds, const std::string& what) {
  if (!holds) fail(what);
}
void call(cuda::Result result, const char* what);
void call(nccl::Result result, const char* what);
#define CALL(...) ::pypipe::test::call(__VA_ARGS__, #__VA_ARGS__)

void knob(const char* name, std::uint64_t value);

// Makes a device's primary context current on the calling thread, which starts without.
void use_device(int device);
// Fails unless exactly one hazard of the kind was reported, and says so.
void expect_report(const char* kind, const std::string& part);

inline std::uint64_t hazards(const char* kind = nullptr) { return pypipe_emulator_hazards(kind); }

// One of the two ranks, with pipes to the other.
class Rank {
 public:
  Rank(int number, int in, int out) : number(number), in_(in), out_(out) {}
  void put(const void* data, std::size_t bytes) const;
  void get(void* data, std::size_t bytes) const;
  void barrier() const;
  [[nodiscard]] int peer() const { return 1 - number; }

  const int number;

 private:
  int in_;
  int out_;
};

// Runs `body` as rank 0 here and as rank 1 in a child. Fails when the child does.
void run_pair(const std::function<void(Rank&)>& body);

class Event {
 public:
  Event() { CALL(cuEventCreate(&handle, cuda::event_disable_timing)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { CALL(cuEventDestroy_v2(handle)); }
  void record(cuda::StreamHandle stream) { CALL(cuEventRecord(handle, stream)); }
  [[nodiscard]] bool done() const { return cuEventQuery(handle) == cuda::Result::success; }
  cuda::EventHandle handle = nullptr;
};

class Stream {
 public:
  explicit Stream(const char* name);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { CALL(cuStreamDestroy_v2(handle)); }
  void wait(const Event& event) { CALL(cuStreamWaitEvent(handle, event.handle, 0)); }
  // Lets `event` say when everything so far is done, and waits for it by asking, or until a hang is reported.
  bool finish();
  // A kernel that fills memory with a value, and one that only reads.
  void fill(void* data, std::size_t bytes, unsigned char value, const char* name = "compute");
  void read(const void* data, std::size_t bytes, const char* name = "compute");
  cuda::StreamHandle handle = nullptr;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { free(); }
  void free();
  [[nodiscard]] std::byte* data() const;
  [[nodiscard]] bool is(unsigned char value) const;
  const std::size_t bytes;

 private:
  cuda::Pointer pointer_ = 0;
};

// An id that rank 0 makes and both have.
nccl::UniqueId shared_id(const Rank& rank);

// A two-rank communicator; rank 0 makes the id.
class Communicator {
 public:
  Communicator(const Rank& rank, const char* name, bool blocking = false);
  // One whose creation may still go on, since a group has it: see settle().
  struct Unsettled {};
  Communicator(const Rank& rank, const char* name, bool blocking, const nccl::UniqueId& id, Unsettled unsettled);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();
  void send(const DeviceMemory& memory, const Stream& stream);
  void receive(const DeviceMemory& memory, const Stream& stream);
  // Polls until the call in progress has finished; what it came to.
  [[nodiscard]] nccl::Result settle() const;
  // Uses both edges once, so that no later call has to connect.
  void warm_up(Stream& stream);
  void abort();
  nccl::CommunicatorHandle handle = nullptr;

 private:
  int peer_;
};

void group_start();
// Aborts them as a group, since each may wait for kernels that wait for another's.
void abort_all(const std::vector<Communicator*>& communicators);
// Ends the group and settles the communicators that were in it.
void group_end(const std::vector<Communicator*>& communicators);

}  // namespace pypipe::test
