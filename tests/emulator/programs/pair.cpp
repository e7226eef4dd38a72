#include "pair.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace pypipe::test {
namespace {

struct Filling {
  void* data;
  std::size_t bytes;
  unsigned char value;
};

}  // namespace

void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED [%d]: %s\n", static_cast<int>(::getpid()), what.c_str());
  std::_Exit(1);
}

void call(cuda::Result result, const char* what) {
  if (result != cuda::Result::success) fail(std::string(what) + " = " + std::to_string(static_cast<int>(result)));
}

void call(nccl::Result result, const char* what) {
  if (result == nccl::Result::success || result == nccl::Result::in_progress) return;
  fail(std::string(what) + " = " + std::to_string(static_cast<int>(result)) + ": " + ncclGetLastError(nullptr));
}

void knob(const char* name, std::uint64_t value) {
  check(pypipe_emulator_set(name, std::to_string(value).c_str()) == 0, std::string("no such knob: ") + name);
}

void use_device(int device) {
  cuda::Context context = nullptr;
  CALL(cuDevicePrimaryCtxRetain(&context, device));
  CALL(cuCtxSetCurrent(context));
}

void expect_report(const char* kind, const std::string& part) {
  check(hazards(kind) == 1, std::string("not exactly one report of the kind ") + kind);
  std::string text(pypipe_emulator_last_report(nullptr, 0) + 1, 0);
  (void)pypipe_emulator_last_report(text.data(), text.size());
  check(text.find(part) != std::string::npos, text + " does not say: " + part);
  pypipe_emulator_reset_counters();
}

void Rank::put(const void* data, std::size_t bytes) const {
  check(::write(out_, data, bytes) == static_cast<ssize_t>(bytes), "the other rank does not listen");
}

void Rank::get(void* data, std::size_t bytes) const {
  check(::read(in_, data, bytes) == static_cast<ssize_t>(bytes), "the other rank is silent");
}

void Rank::barrier() const {
  char token = 0;
  put(&token, 1);
  get(&token, 1);
}

void run_pair(const std::function<void(Rank&)>& body) {
  std::array<int, 2> down{};
  std::array<int, 2> up{};
  check(::pipe(down.data()) == 0 && ::pipe(up.data()) == 0, "pipe");
  const pid_t child = ::fork();
  check(child >= 0, "fork");
  Rank rank(child == 0 ? 1 : 0, child == 0 ? down[0] : up[0], child == 0 ? up[1] : down[1]);
  ::close(child == 0 ? down[1] : down[0]);
  ::close(child == 0 ? up[0] : up[1]);
  body(rank);
  if (child == 0) std::exit(0);
  int status = 0;
  check(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank 1 failed");
}

Stream::Stream(const char* name) {
  CALL(cuStreamCreateWithPriority(&handle, cuda::stream_non_blocking, -5));
  pypipe_emulator_name_stream(handle, name);
}

bool Stream::finish() {
  Event done;
  done.record(handle);
  while (!done.done()) {
    if (hazards("hang") != 0) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void Stream::fill(void* data, std::size_t bytes, unsigned char value, const char* name) {
  const pypipe_emulator_range range{data, bytes, 1};
  const auto run = [](void* argument) {
    const auto* what = static_cast<Filling*>(argument);
    std::memset(what->data, what->value, what->bytes);
    delete what;
  };
  pypipe_emulator_launch(handle, name, run, new Filling{data, bytes, value}, &range, 1);
}

void Stream::read(const void* data, std::size_t bytes, const char* name) {
  pypipe_emulator_reads(data, bytes, handle, name);
}

DeviceMemory::DeviceMemory(std::size_t size) : bytes(size) { CALL(cuMemAlloc_v2(&pointer_, size)); }

void DeviceMemory::free() {
  if (pointer_ != 0) CALL(cuMemFree_v2(pointer_));
  pointer_ = 0;
}

std::byte* DeviceMemory::data() const { return reinterpret_cast<std::byte*>(pointer_); }

bool DeviceMemory::is(unsigned char value) const {
  return std::all_of(data(), data() + bytes, [&](std::byte byte) { return byte == std::byte{value}; });
}

nccl::UniqueId shared_id(const Rank& rank) {
  nccl::UniqueId id{};
  if (rank.number == 0) {
    CALL(ncclGetUniqueId(&id));
    rank.put(&id, sizeof id);
  } else {
    rank.get(&id, sizeof id);
  }
  return id;
}

Communicator::Communicator(const Rank& rank, const char* name, bool blocking)
    : Communicator(rank, name, blocking, shared_id(rank), Unsettled()) {
  check(settle() == nccl::Result::success, "the communicator was not created");
}

Communicator::Communicator(const Rank& rank, const char* name, bool blocking, const nccl::UniqueId& id,
                           Unsettled /*unsettled*/)
    : peer_(rank.peer()) {
  nccl::Config config;
  config.version = 23007;
  config.blocking = blocking ? 1 : 0;
  config.split_share = 0;
  config.comm_name = name;
  CALL(ncclCommInitRankConfig(&handle, 2, id, rank.number, &config));
}

Communicator::~Communicator() {
  if (handle != nullptr) CALL(ncclCommDestroy(handle));
}

void Communicator::send(const DeviceMemory& memory, const Stream& stream) {
  CALL(ncclSend(memory.data(), memory.bytes, nccl::uint8, peer_, handle, stream.handle));
}

void Communicator::receive(const DeviceMemory& memory, const Stream& stream) {
  CALL(ncclRecv(memory.data(), memory.bytes, nccl::uint8, peer_, handle, stream.handle));
}

nccl::Result Communicator::settle() const {
  nccl::Result state = nccl::Result::in_progress;
  for (;;) {
    CALL(ncclCommGetAsyncError(handle, &state));
    if (state != nccl::Result::in_progress || hazards("hang") != 0) return state;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void Communicator::warm_up(Stream& stream) {
  const DeviceMemory memory(2);
  group_start();
  CALL(ncclSend(memory.data(), 1, nccl::uint8, peer_, handle, stream.handle));
  CALL(ncclRecv(memory.data() + 1, 1, nccl::uint8, peer_, handle, stream.handle));
  group_end({this});
  check(stream.finish(), "the warm-up hangs");
}

void Communicator::abort() {
  CALL(ncclCommAbort(handle));
  handle = nullptr;
}

void abort_all(const std::vector<Communicator*>& communicators) {
  group_start();
  for (Communicator* communicator : communicators) communicator->abort();
  CALL(ncclGroupEnd());
}

void group_start() { CALL(ncclGroupStart()); }

void group_end(const std::vector<Communicator*>& communicators) {
  CALL(ncclGroupEnd());
  for (const Communicator* communicator : communicators) (void)communicator->settle();
}

}  // namespace pypipe::test
