#include "groups.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "kernel.hpp"

namespace pypipe::emulator {
namespace {

using nccl::Result;

// All transfers of a group on one communicator.
struct Member {
  std::shared_ptr<Communicator> communicator;
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::vector<std::shared_ptr<Stream>> streams;  // distinct, in the order of their first use
};

struct Group {
  int depth = 0;
  Result error = Result::success;
  int blocking = -1;  // not known yet
  std::vector<Job> jobs;
  std::vector<Member> members;
};

thread_local Group group;

// Whether a communicator goes with the others of the group.
Result join(const Communicator& on) {
  if (group.blocking == -1) group.blocking = on.blocking ? 1 : 0;
  if (group.blocking == (on.blocking ? 1 : 0)) return Result::success;
  return engine().communicators.refuse(Result::invalid_argument,
                                       "Blocking and nonblocking communicators are not allowed in the same group");
}

Member& member_of(const std::shared_ptr<Communicator>& communicator) {
  for (Member& member : group.members) {
    if (member.communicator == communicator) return member;
  }
  group.members.push_back({communicator, {}, {}});
  return group.members.back();
}

std::size_t size_of_type(int type) {  // of ncclDataType_t
  constexpr std::array<std::size_t, 12> sizes{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && static_cast<std::size_t>(type) < sizes.size() ? sizes.at(static_cast<std::size_t>(type)) : 0;
}

bool uses(const Member& member, bool sends) {
  return std::any_of(member.transfers.begin(), member.transfers.end(), [&](const auto& transfer) {
    return transfer->sends() == sends && transfer->peer != member.communicator->rank;
  });
}

bool connected(const Member& member) {
  return (!uses(member, true) || member.communicator->connected(true)) &&
         (!uses(member, false) || member.communicator->connected(false));
}

// Announces the edges that the group uses first, all of them before any is waited for.
void announce(Lock& lock, const std::vector<Member>& members) {
  for (const Member& member : members) {
    Communicator& on = *member.communicator;
    for (const bool sends : {true, false}) {
      bool& used = sends ? on.used_send : on.used_receive;
      if (used || on.size == 1 || !uses(member, sends)) continue;
      used = true;
      lock.unlock();
      on.wire.write({FrameKind::edge, 0, 0, sends, false, {}, {}});
      lock.lock();
    }
  }
}

void launch(Member& member, const Issue& issue) {
  Stream& first = *member.streams.front();
  for (const auto& other : member.streams) {
    if (other.get() != &first) Streams::wait(first, Streams::record(*other, issue), issue);
  }
  Streams::append(first, std::make_unique<Kernel>(member.communicator, std::move(member.transfers), issue));
  if (member.streams.size() == 1) return;
  const std::shared_ptr<Record> after = Streams::record(first, issue);
  for (const auto& other : member.streams) {
    if (other.get() != &first) Streams::wait(*other, after, issue);
  }
}

void count_deferred(const std::vector<Member>& members, int change) {
  for (const Member& member : members) {
    member.communicator->deferred += change;
    for (const auto& stream : member.streams) stream->deferred += change;
  }
}

Result foreign(const std::string& what, const Communicator& on) {
  engine().reports.hazard("context", what + ", and " + on.name + " is on device " + std::to_string(on.device) + ": " +
                                         emulator::describe(Call::site()));
  return Result::unhandled_cuda_error;
}

Result check(const std::vector<Member>& members) {
  Communicators& all = engine().communicators;
  for (const Member& member : members) {
    const Communicator& on = *member.communicator;
    std::vector<Access> accesses;
    int to_self = 0;
    for (const auto& transfer : member.transfers) {
      accesses.push_back(transfer->buffer.access);
      if (transfer->peer == on.rank) to_self += transfer->sends() ? 1 : -1;
    }
    if (to_self != 0) {
      return all.refuse(Result::invalid_usage, "a send to oneself without its receive in the group, or reversed");
    }
    Checker::together(accesses);
  }
  return Result::success;
}

Result run_jobs(Lock& lock, const std::vector<Job>& jobs) {
  if (jobs.empty()) return Result::success;
  if (jobs.size() == 1) return jobs.front().run(lock);
  struct Shared {
    std::size_t left;
    std::vector<bool> over;
    Result result = Result::success;
    std::condition_variable changed;
  };
  const auto shared = std::make_shared<Shared>();
  shared->left = jobs.size();
  shared->over.resize(jobs.size());
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    std::thread([shared, &jobs, i, site = Call::site()] {
      Call::adopt(site);
      Lock mine(engine().mutex);
      const Result result = jobs[i].run(mine);
      shared->over[i] = true;
      if (result != Result::success && shared->result == Result::success) {
        shared->result = result;
        for (std::size_t j = 0; j < jobs.size(); ++j) {
          if (!shared->over[j] && jobs[j].stop) jobs[j].stop();
        }
      }
      --shared->left;
      shared->changed.notify_all();
    }).detach();
  }
  engine().host_wait(lock, shared->changed, "all that its group creates, finalizes or ends",
                     [&] { return shared->left == 0; });
  return shared->result;
}

// The first uses of edges are jobs too (src/group.cc: ncclP2PPreconnectFunc).
Result connect(Lock& lock, const std::vector<Member>& members) {
  announce(lock, members);
  std::vector<Job> jobs;
  for (const Member& member : members) {
    if (connected(member)) continue;
    Communicator& on = *member.communicator;
    const auto wait = [&on, &member, before = on.state](Lock& own) {
      const auto broken = [&] { return on.aborted() || on.state != before; };
      engine().host_wait(own, on.changed, "the peer's first use of an edge of " + on.name,
                         [&] { return broken() || connected(member); });
      if (!broken()) return Result::success;
      return on.aborted() ? Result::internal_error : on.state;
    };
    jobs.push_back({member.communicator, false, wait,
                    [&on] { on.fail(Result::internal_error, "another of its group could not be connected"); }});
  }
  return run_jobs(lock, jobs);
}

// The failure of one is the failure of all (src/group.cc: groupCleanup).
void clean_up(const Group& failed, Result error) {
  for (const Job& job : failed.jobs) {
    if (!job.reclaims && !job.communicator->aborted()) job.communicator->fail(error, "its group failed");
  }
  for (const Member& member : failed.members) {
    if (!member.communicator->blocking) member.communicator->fail(error, "its group failed");
  }
}

// `later`: on a background thread, after ncclInProgress.
Result run(Lock& lock, Group& ended, const Issue& issue, bool later) {
  Result result = run_jobs(lock, ended.jobs);
  if (result == Result::success) result = connect(lock, ended.members);
  if (later) count_deferred(ended.members, -1);
  if (result != Result::success) clean_up(ended, result);
  for (const Job& job : ended.jobs) {
    Communicator& on = *job.communicator;
    if (job.reclaims) continue;
    if (on.state == Result::in_progress) on.state = Result::success;
    --on.jobs;
    on.changed.notify_all();
  }
  for (Member& member : ended.members) {
    Communicator& on = *member.communicator;
    on.changed.notify_all();
    if (result != Result::success && !on.aborted()) continue;
    if (on.aborted()) {
      result = Result::internal_error;
    } else if (on.state != (later ? Result::in_progress : Result::success)) {
      result = on.state;
    } else {
      launch(member, issue);
      on.state = Result::success;
    }
  }
  ended.members.clear();  // with the lock: transfers leave the engine's lists
  return result;
}

Result run_later(Group ended, const Issue& issue) {
  for (const Job& job : ended.jobs) job.communicator->state = Result::in_progress;
  for (const Member& member : ended.members) member.communicator->state = Result::in_progress;
  count_deferred(ended.members, 1);
  Random& random = (ended.jobs.empty() ? ended.members.front().communicator : ended.jobs.front().communicator)->random;
  std::thread(
      [pause = engine().delay(random), issue](Group later) {
        Call::adopt(issue.site);
        std::this_thread::sleep_for(pause);
        Lock background(engine().mutex);
        (void)run(background, later, issue, true);
        later.jobs.clear();
      },
      std::move(ended))
      .detach();
  return Result::in_progress;
}

}  // namespace

Result group_start() {
  ++group.depth;
  return Result::success;
}

bool in_group() { return group.depth != 0; }

Result group_end(Lock& lock) {
  if (group.depth == 0) {
    return engine().communicators.refuse(Result::invalid_usage, "ncclGroupEnd without ncclGroupStart");
  }
  if (--group.depth != 0) return Result::success;
  Group ended = std::exchange(group, Group());
  if (ended.error == Result::success) ended.error = check(ended.members);
  if (ended.error != Result::success) {
    clean_up(ended, ended.error);
    for (const Job& job : ended.jobs) job.communicator->jobs -= job.reclaims ? 0 : 1;
    return ended.error;
  }
  if (ended.jobs.empty() && ended.members.empty()) return Result::success;
  std::stable_sort(ended.members.begin(), ended.members.end(), [](const Member& one, const Member& other) {
    return one.communicator->hash < other.communicator->hash;
  });
  const Issue issue = Issue::now();
  const bool ready = ended.jobs.empty() && std::all_of(ended.members.begin(), ended.members.end(), connected);
  const bool later = ended.blocking == 0 &&
                     (!ready || ended.members.front().communicator->random.below(100) < engine().knobs.in_progress);
  if (later) return run_later(std::move(ended), issue);
  return run(lock, ended, issue, false);
}

Result grouped(Lock& lock, const std::function<Result()>& collect) {
  group_start();
  const Result result = collect();
  if (result != Result::success && result != Result::in_progress && group.error == Result::success) {
    group.error = result;
  }
  if (group.depth == 1) return group_end(lock);
  (void)group_end(lock);
  return result;
}

Result enlist(Job job) {
  if (job.reclaims) {
    group.blocking = 1;
  } else if (const Result result = join(*job.communicator); result != Result::success) {
    return result;
  } else {
    ++job.communicator->jobs;
  }
  group.jobs.push_back(std::move(job));
  return Result::success;
}

Result transfer(Lock& lock, const char* name, const void* data, std::size_t count, int type, int peer,
                nccl::CommunicatorHandle communicator, cuda::StreamHandle stream) {
  Communicators& all = engine().communicators;
  const auto collect = [&](const std::shared_ptr<Communicator>& on) {
    if (size_of_type(type) == 0) return all.refuse(Result::invalid_argument, "no such data type");
    if (peer < 0 || peer >= on->size) return all.refuse(Result::invalid_argument, "no such peer");
    if (data == nullptr && count != 0) return all.refuse(Result::invalid_argument, "no buffer");
    if (Streams::is_host(stream)) {
      return all.refuse(Result::invalid_argument,
                        "the emulator runs no NCCL kernels on stream 0 where it is the host (knob default_stream)");
    }
    const std::shared_ptr<Stream> target = engine().streams.find(stream);
    if (!target) return Result::invalid_argument;
    if (target->capture) {
      engine().captures.invalidate(*target->capture, capture_errors::unsupported,
                                   "an NCCL kernel, which this emulator cannot capture,");
      return Result::unhandled_cuda_error;
    }
    if (target->device != on->device) {
      return foreign(target->name + " is on device " + std::to_string(target->device), *on);
    }
    const int where = engine().memory.device_of(range_of(data, count * size_of_type(type)));
    if (where != -1 && where != on->device) return foreign("memory of device " + std::to_string(where), *on);
    if (const Result mixed = join(*on); mixed != Result::success) return mixed;
    Member& member = member_of(on);
    member.transfers.push_back(std::make_unique<Transfer>(*on, name, data, count * size_of_type(type), peer, *target));
    if (std::find(member.streams.begin(), member.streams.end(), target) == member.streams.end()) {
      member.streams.push_back(target);
    }
    return Result::success;
  };
  return grouped(lock, [&] {
    Result result = Result::success;
    const std::shared_ptr<Communicator> on = all.usable(communicator, result);
    if (!on) return result;
    result = collect(on);
    if (result != Result::success && !on->blocking) on->fail(result, all.last_error());  // src/enqueue.cc
    return result;
  });
}

}  // namespace pypipe::emulator
