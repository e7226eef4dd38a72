// Communicators: their life, their errors, their wire; groups.cpp issues their operations, kernel.cpp runs
// them.
//
// Who writes what, all of it under the engine's lock:
//   life      the thread that creates the communicator in the background, then whoever finalizes or aborts it
//   launched  groups: the turn that a kernel gets when it is appended to its stream
//   finished  kernels: the turn that has ended; a kernel starts when all earlier turns have ended, on any
//   stream staged    kernels add when they stage a send; the reader takes off when the peer has taken it
//   ready, arrived, taken edges: the reader stores, kernels and first uses read
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine.hpp"
#include "link/nccl/nccl_abi.hpp"
#include "transport.hpp"

namespace pypipe::emulator {

enum class Life { connecting, alive, finalizing, finalized, dead };

// Of ncclCommRegister.
struct Registration {
  Range range;
  std::vector<Epoch> uses;  // the ends of transfers of this memory, of each stream the latest
};

struct Communicator {
  // Its kernels end at once, those that are still in a stream when they get there.
  [[nodiscard]] bool aborted() const noexcept { return life == Life::dead; }
  // The peer's end is gone, and this library would notice.
  [[nodiscard]] bool lost() const noexcept { return peer_gone && engine().knobs.death_is_told; }
  [[nodiscard]] bool connected(bool sends) const noexcept {
    return size == 1 || !lazy || (sends ? used_send && peer_receives : used_receive && peer_sends);
  }
  void fail(nccl::Result result, const std::string& why);
  // The registration that holds all of the range, or null.
  [[nodiscard]] Registration* registration_of(Range range);

  nccl::CommunicatorHandle handle = nullptr;
  std::string name;
  int version = 0;  // of the library
  int device = 0;
  int rank = 0;
  int size = 1;
  bool blocking = true;
  bool lazy = true;
  std::size_t hash = 0;  // of the unique id: the same on both ranks
  bool ordered = false;  // with an implicit launch order
  Random random;

  Life life = Life::connecting;
  nccl::Result state = nccl::Result::in_progress;  // what ncclCommGetAsyncError says
  std::string problem;
  std::condition_variable changed;
  Clock clock;  // of everything that its kernels did

  int jobs = 0;      // creations and finalizations that groups have not finished
  int deferred = 0;  // calls in progress that have yet to launch
  std::uint64_t launched = 0;
  std::uint64_t finished = 0;
  std::string running;      // the kernel whose turn it is
  std::uint64_t sends = 0;  // issued so far: the numbers by which the two ends match
  std::uint64_t receives = 0;

  std::size_t staged = 0;
  std::set<std::uint64_t> unmatched;             // staged sends whose receives have not started
  std::map<std::uint64_t, std::uint64_t> ready;  // the peer's receives that have started, and their sizes
  std::map<std::uint64_t, Frame> arrived;        // the peer's messages that wait for a receive

  bool used_send = false;  // edges on which the first use was announced, by us and by the peer
  bool used_receive = false;
  bool peer_sends = false;
  bool peer_receives = false;
  bool peer_left = false;  // with a goodbye
  bool peer_gone = false;  // with or without

  std::set<Buffer*> buffers;  // of its operations that are not done
  std::map<void*, Registration> registered;
  Wire wire;
  Fd listener;  // while connecting
};

class Communicators {
 public:
  nccl::Result create(Lock& lock, nccl::CommunicatorHandle* handle, int size, const nccl::UniqueId& id, int rank,
                      const nccl::Config* config, int version);
  nccl::Result async_error(nccl::CommunicatorHandle handle, nccl::Result* result);
  nccl::Result finalize(Lock& lock, nccl::CommunicatorHandle handle);
  nccl::Result destroy(Lock& lock, nccl::CommunicatorHandle handle);
  nccl::Result abort(Lock& lock, nccl::CommunicatorHandle handle);
  nccl::Result enroll(nccl::CommunicatorHandle handle, void* data, std::size_t bytes, void** registration);
  nccl::Result withdraw(nccl::CommunicatorHandle handle, void* registration);

  // The communicator, if it may be used now; otherwise null, with the reason in `result`, reported.
  std::shared_ptr<Communicator> usable(nccl::CommunicatorHandle handle, nccl::Result& result);
  // The communicator in whatever state, null (reported) for a handle that is none.
  std::shared_ptr<Communicator> find(nccl::CommunicatorHandle handle);

  // Reports registrations of memory that is being freed.
  void check_registrations(Range range) const;
  nccl::Result refuse(nccl::Result result, const std::string& why);
  [[nodiscard]] const std::string& last_error() const noexcept { return last_error_; }
  [[nodiscard]] std::string describe() const;

 private:
  static nccl::Result connect(Lock& lock, const std::shared_ptr<Communicator>& made, const nccl::UniqueId& id,
                              int version);
  static void read(const std::shared_ptr<Communicator>& from);
  static nccl::Result wind_up(Lock& lock, const std::shared_ptr<Communicator>& of);
  static void end(Communicator& of);
  nccl::Result reclaim(Lock& lock, const std::shared_ptr<Communicator>& of);

  std::map<nccl::CommunicatorHandle, std::shared_ptr<Communicator>> all_;
  std::uint64_t handles_ = 0;
  std::uint64_t registrations_ = 0;
  std::string last_error_;
};

}  // namespace pypipe::emulator
