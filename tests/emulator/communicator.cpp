#include "communicator.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <thread>
#include <utility>

#include "groups.hpp"

namespace pypipe::emulator {
namespace {

using nccl::Result;

std::string shown(int value) { return value == nccl::unset ? "unset" : std::to_string(value); }

// What is wrong with a configuration, or nothing. Fields that its size or version do not cover are not looked
// at.
std::string objection(const nccl::Config& config) {
  if (config.magic != 0xcafebeef) return "the configuration's magic number is wrong";
  if (config.size < offsetof(nccl::Config, cga_cluster_size) || config.size > 4096) {
    return "the configuration's size is " + std::to_string(config.size);
  }
  if (config.version < 21400 || config.version > 39999) {
    return "the configuration's version is " + std::to_string(config.version);
  }
  const auto flag = [](int value) { return value == nccl::unset || value == 0 || value == 1; };
  if (!flag(config.blocking)) return "blocking is " + shown(config.blocking);
  if (config.size < offsetof(nccl::Config, split_share)) return {};
  for (const int ctas : {config.min_ctas, config.max_ctas}) {
    if (ctas != nccl::unset && ctas <= 0) return "min_ctas or max_ctas is " + shown(ctas);
  }
  if (config.min_ctas != nccl::unset && config.max_ctas != nccl::unset && config.min_ctas > config.max_ctas) {
    return "min_ctas is above max_ctas";
  }
  if (config.cga_cluster_size != nccl::unset && (config.cga_cluster_size < 0 || config.cga_cluster_size > 8)) {
    return "cga_cluster_size is " + shown(config.cga_cluster_size);
  }
  if (config.size >= offsetof(nccl::Config, traffic_class) && !flag(config.split_share)) {
    return "split_share is " + shown(config.split_share);
  }
  return {};
}

// Whether the kernels of the process's communicators start in the order of issue.
bool launch_order(const nccl::Config* config, int version) {
  if (version >= 23100 && config != nullptr && config->version >= 23100 &&
      config->size > offsetof(nccl::Config, launch_order_implicit) && config->launch_order_implicit != nccl::unset) {
    return config->launch_order_implicit == 1;
  }
  const char* wanted = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  return version >= 22600 && wanted != nullptr && std::strtol(wanted, nullptr, 10) == 1;
}

std::string name_of(const nccl::Config* config, std::uint64_t number) {
  std::string name = "communicator " + std::to_string(number);
  if (config != nullptr && config->size > offsetof(nccl::Config, comm_name) && config->version >= 22700 &&
      config->comm_name != nullptr) {
    name += std::string(" '") + config->comm_name + "'";
  }
  return name;
}

}  // namespace

void Communicator::fail(Result result, const std::string& why) {
  if (state == Result::success || state == Result::in_progress) {
    state = result;
    problem = why;
    engine().reports.note(name + ": asynchronous error " + std::to_string(static_cast<int>(result)) + ": " + why);
  }
  changed.notify_all();
}

Registration* Communicator::registration_of(Range range) {
  for (auto& [handle, registration] : registered) {
    if (registration.range.begin <= range.begin && range.end <= registration.range.end) return &registration;
  }
  return nullptr;
}

Result Communicators::refuse(Result result, const std::string& why) {
  last_error_ = why;
  engine().reports.hazard("usage", why + ": " + emulator::describe(Call::site()));
  return result;
}

Result Communicators::create(Lock& lock, nccl::CommunicatorHandle* handle, int size, const nccl::UniqueId& id, int rank,
                             const nccl::Config* config, int version) {
  if (handle == nullptr) return refuse(Result::invalid_argument, "no place for the communicator");
  *handle = nullptr;
  if (size < 1 || rank < 0 || rank >= size) return refuse(Result::invalid_argument, "rank or size is wrong");
  if (size > 2) return refuse(Result::invalid_argument, "this emulator has communicators of 1 and 2 ranks only");
  if (config != nullptr) {
    const std::string problem = objection(*config);
    if (!problem.empty()) return refuse(Result::invalid_argument, problem);
  }
  auto made = std::make_shared<Communicator>();
  made->handle = reinterpret_cast<nccl::CommunicatorHandle>(0x4300000000000000U + ++handles_ * 16);
  made->name = name_of(config, handles_) + " (rank " + std::to_string(rank) + ")";
  made->version = version;
  made->device = Contexts::device();  // the current one's (src/init.cc: ncclCommInitRankConfig)
  made->rank = rank;
  made->size = size;
  made->blocking = config == nullptr || config->blocking != 0;
  made->lazy = engine().knobs.lazy;
  made->ordered = launch_order(config, version);
  made->random = engine().new_random();
  made->hash = std::hash<std::string_view>()({id.internal, sizeof id.internal});
  all_[made->handle] = made;
  *handle = made->handle;  // at the call, before the group ends (src/init.cc: ncclCommInitRankDev)
  return grouped(lock, [&] {
    const Result result =
        enlist({made, false, [made, id, version](Lock& own) { return connect(own, made, id, version); },
                [made] {
                  made->fail(Result::internal_error, "another of its group was not created");
                  if (made->listener) ::shutdown(made->listener.get(), SHUT_RDWR);
                }});
    if (result == Result::success) return result;
    all_.erase(made->handle);
    *handle = nullptr;
    return result;
  });
}

Result Communicators::connect(Lock& lock, const std::shared_ptr<Communicator>& made, const nccl::UniqueId& id,
                              int version) {
  const auto stopped = [&] { return made->aborted() || made->state != Result::in_progress; };
  const auto give_up = [&](Result result, const std::string& why) {
    if (stopped()) return Result::internal_error;
    made->fail(result, why);
    return result;
  };
  std::string problem;
  const auto pause = engine().delay(made->random);
  lock.unlock();
  std::this_thread::sleep_for(pause);
  Fd listener = call_listener(id, problem);
  lock.lock();
  if (stopped() || !listener) return give_up(Result::system_error, problem);
  made->listener = std::move(listener);  // stays open, so that an abort can shut it down
  const auto here = engine().host_waits.insert(
      engine().host_waits.end(), {Engine::thread_name(), "the other rank of " + made->name, Call::site()});
  lock.unlock();
  Meeting meeting = meet(made->listener.get(), made->rank, made->size, version);
  lock.lock();
  engine().host_waits.erase(here);
  ++engine().progress;
  if (stopped() || meeting.result != Result::success) return give_up(meeting.result, meeting.problem);
  made->life = Life::alive;
  ++engine().progress;
  if (meeting.socket) {
    made->wire.open(std::move(meeting.socket));
    std::thread([made] { read(made); }).detach();
  }
  made->changed.notify_all();
  return Result::success;
}

// The thread that reads a communicator's wire. It only stores.
void Communicators::read(const std::shared_ptr<Communicator>& from) {
  Frame frame;
  Random random;
  {
    const Lock lock(engine().mutex);
    random = engine().new_random();
  }
  while (from->wire.read(frame)) {
    Lock lock(engine().mutex);
    if (const auto pause = engine().delay(random); pause.count() != 0) {
      lock.unlock();
      std::this_thread::sleep_for(pause);
      lock.lock();
    }
    ++engine().progress;
    switch (frame.kind) {
      case FrameKind::edge:
        (frame.flag ? from->peer_sends : from->peer_receives) = true;
        break;
      case FrameKind::ready:
        if (from->unmatched.erase(frame.index) == 0) from->ready[frame.index] = frame.bytes;
        break;
      case FrameKind::data:
        from->arrived[frame.index] = std::move(frame);
        frame = Frame();
        break;
      case FrameKind::taken:
        from->staged -= frame.bytes;
        break;
      case FrameKind::fault:
        from->fail(Result::remote_error, "the peer's end failed");
        break;
      case FrameKind::goodbye:
        from->peer_left = true;
        break;
    }
    from->changed.notify_all();
  }
  const Lock lock(engine().mutex);
  from->peer_gone = true;
  if (!from->peer_left && !from->aborted() && from->lost()) {
    from->fail(Result::remote_error, "the connection to the peer broke");
  }
  from->changed.notify_all();
}

std::shared_ptr<Communicator> Communicators::find(nccl::CommunicatorHandle handle) {
  const auto at = all_.find(handle);
  if (at != all_.end() && !at->second->aborted()) return at->second;
  refuse(Result::invalid_argument, "no such communicator (it may have been destroyed or aborted)");
  return nullptr;
}

std::shared_ptr<Communicator> Communicators::usable(nccl::CommunicatorHandle handle, Result& result) {
  result = Result::invalid_argument;
  std::shared_ptr<Communicator> found = find(handle);
  if (!found) return nullptr;
  if (found->state == Result::in_progress) {
    refuse(result, found->name + " is used before its previous call has finished (ncclInProgress)");
    return nullptr;
  }
  if (found->state != Result::success) {
    result = found->state;  // not a mistake: the caller learns of the error here
    last_error_ = found->problem;
    return nullptr;
  }
  if (found->life != Life::alive) {
    refuse(result, found->name + " is used after ncclCommFinalize");
    return nullptr;
  }
  result = Result::success;
  return found;
}

Result Communicators::async_error(nccl::CommunicatorHandle handle, Result* result) {
  const std::shared_ptr<Communicator> found = find(handle);
  if (!found || result == nullptr) return Result::invalid_argument;
  *result = found->state;
  if (found->state != Result::success) last_error_ = found->problem;
  return Result::success;
}

// Waits for all kernels, tells the peer, and waits until it says goodbye too.
Result Communicators::wind_up(Lock& lock, const std::shared_ptr<Communicator>& of) {
  const Result before = of->state;
  const auto over = [&] { return of->aborted() || of->state != before; };
  const auto result = [&] { return of->aborted() ? Result::internal_error : of->state; };
  if (of->finished != of->launched) ++engine().synchronizations;
  engine().host_wait(lock, of->changed, "the operations of " + of->name,
                     [&] { return over() || of->finished == of->launched; });
  if (over()) return result();
  if (of->wire) {
    lock.unlock();
    of->wire.write({FrameKind::goodbye, 0, 0, false, false, {}, {}});
    lock.lock();
    engine().host_wait(lock, of->changed, "the peer of " + of->name + " to finalize it too",
                       [&] { return over() || of->peer_left || of->peer_gone; });
    if (over()) return result();
  }
  of->life = Life::finalized;
  return Result::success;
}

Result Communicators::finalize(Lock& lock, nccl::CommunicatorHandle handle) {
  return grouped(lock, [&] {
    Result result = Result::success;
    const std::shared_ptr<Communicator> found = usable(handle, result);
    if (!found) return result;
    result = enlist({found, false, [found](Lock& own) { return wind_up(own, found); },
                     [found] { found->fail(Result::internal_error, "another of its group was not finalized"); }});
    if (result == Result::success) found->life = Life::finalizing;
    return result;
  });
}

Result Communicators::destroy(Lock& lock, nccl::CommunicatorHandle handle) {
  if (handle == nullptr) return Result::success;
  return grouped(lock, [&] {
    const std::shared_ptr<Communicator> found = find(handle);
    if (!found) return Result::invalid_argument;
    if (found->state == Result::in_progress || found->jobs != 0) {
      return refuse(Result::invalid_argument,
                    found->name + " is destroyed before its previous call has finished (ncclInProgress)");
    }
    if (found->state != Result::success) {  // src/init.cc: ncclCommEnsureReady, before anything is freed
      return refuse(found->state, found->name + " has failed, so that only ncclCommAbort can end it");
    }
    if (!found->registered.empty()) {
      engine().reports.hazard("registered", found->name + " is destroyed with " +
                                                std::to_string(found->registered.size()) +
                                                " buffers still registered: " + emulator::describe(Call::site()));
    }
    const auto job = [this, found](Lock& own) {
      if (found->life == Life::alive) {
        found->life = Life::finalizing;
        (void)wind_up(own, found);
      }
      // Nothing stops a kernel that spins.
      engine().host_wait(own, found->changed, "the kernels of " + found->name + ", which is destroyed",
                         [&] { return found->finished == found->launched; });
      end(*found);
      return reclaim(own, found);
    };
    if (found->version < 22200) return job(lock);
    return enlist({found, true, job, nullptr});
  });
}

// The flag is set at the call; what waits for the device is a job of the group from 2.22 on, and the call's own before
// (src/init.cc: ncclCommAbort, commReclaim).
Result Communicators::abort(Lock& lock, nccl::CommunicatorHandle handle) {
  if (handle == nullptr) return Result::success;
  const std::shared_ptr<Communicator> found = find(handle);
  if (!found) return Result::invalid_argument;
  end(*found);
  const auto job = [this, found](Lock& own) { return reclaim(own, found); };
  if (found->version < 22200) return job(lock);
  return grouped(lock, [&] { return enlist({found, true, job, nullptr}); });
}

// Running kernels end, and kernels that start later end at once.
void Communicators::end(Communicator& of) {
  of.life = Life::dead;
  of.wire.shut();
  if (of.listener) ::shutdown(of.listener.get(), SHUT_RDWR);
  of.changed.notify_all();
}

// Waits until all kernels have been through their streams, which may be held up by kernels of communicators that go on
// (src/init.cc: commDestroySync synchronizes the stream that follows each kernel), and forgets the handle.
Result Communicators::reclaim(Lock& lock, const std::shared_ptr<Communicator>& of) {
  engine().host_wait(
      lock, of->changed,
      "the kernels of " + of->name + ", which ends; " + std::to_string(of->launched - of->finished) +
          " are still in their streams",
      [&] { return of->finished == of->launched && of->running.empty() && of->deferred == 0 && of->jobs == 0; });
  for (Buffer* buffer : of->buffers) buffer->moot = true;
  all_.erase(of->handle);
  engine().join_all_threads(of->clock);
  return Result::success;
}

Result Communicators::enroll(nccl::CommunicatorHandle handle, void* data, std::size_t bytes, void** registration) {
  Result result = Result::success;
  const std::shared_ptr<Communicator> found = usable(handle, result);
  if (!found) return result;
  if (data == nullptr || bytes == 0 || registration == nullptr) {
    return refuse(Result::invalid_argument, "ncclCommRegister without memory");
  }
  *registration = reinterpret_cast<void*>(0x5200000000000000U + ++registrations_ * 16);
  found->registered[*registration] = {range_of(data, bytes), {}};
  return Result::success;
}

Result Communicators::withdraw(nccl::CommunicatorHandle handle, void* registration) {
  const std::shared_ptr<Communicator> found = find(handle);
  if (!found) return Result::invalid_argument;
  const auto at = found->registered.find(registration);
  if (at == found->registered.end()) {
    return refuse(Result::invalid_argument, "no such registration on " + found->name);
  }
  // It takes effect at the call, in no stream's order (src/register/register.cc: ncclCommDeregister).
  const Clock& known = engine().host().clock;
  const auto in_use = [&](const Buffer* buffer) { return buffer->access.range.overlaps(at->second.range); };
  if (std::any_of(found->buffers.begin(), found->buffers.end(), in_use) ||
      !std::all_of(at->second.uses.begin(), at->second.uses.end(), [&](Epoch use) { return known.covers(use); })) {
    engine().reports.hazard("registered", "memory is deregistered while a transfer of " + found->name +
                                              " may still use it: " + emulator::describe(Call::site()));
  }
  found->registered.erase(at);
  return Result::success;
}

void Communicators::check_registrations(Range range) const {
  for (const auto& [handle, communicator] : all_) {
    for (const auto& [registration, registered] : communicator->registered) {
      if (!registered.range.overlaps(range)) continue;
      engine().reports.hazard("registered", "memory is freed while it is registered with " + communicator->name + ": " +
                                                emulator::describe(Call::site()));
    }
  }
}

std::string Communicators::describe() const {
  std::string text;
  for (const auto& [handle, of] : all_) {
    text += "\n    " + of->name + ": " + std::to_string(of->finished) + " of " + std::to_string(of->launched) +
            " kernels done" + (of->running.empty() ? "" : ", running " + of->running) + "; " +
            std::to_string(of->staged) + " bytes staged, " + std::to_string(of->arrived.size()) +
            " messages not received, " + std::to_string(of->ready.size()) + " receives of the peer started";
    if (of->peer_gone) text += "; the peer is gone";
  }
  return text;
}

}  // namespace pypipe::emulator
