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
  std::vector<Member> members;
};

thread_local Group group;

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
      on.wire.write({FrameKind::edge, 0, 0, sends, {}, {}});
      lock.lock();
    }
  }
}

void connect(Lock& lock, const std::vector<Member>& members) {
  announce(lock, members);
  for (const Member& member : members) {
    Communicator& on = *member.communicator;
    const Result before = on.state;
    engine().host_wait(lock, on.changed, "the peer's first use of an edge of " + on.name,
                       [&] { return on.aborted() || on.state != before || connected(member); });
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

void launch_later(std::vector<Member> members, const Issue& issue, std::chrono::microseconds pause) {
  Call::adopt(issue.site);
  std::this_thread::sleep_for(pause);
  Lock lock(engine().mutex);
  connect(lock, members);
  count_deferred(members, -1);
  for (const Member& member : members) member.communicator->changed.notify_all();
  for (Member& member : members) {
    Communicator& on = *member.communicator;
    if (on.aborted() || on.state != Result::in_progress) continue;
    launch(member, issue);
    on.state = Result::success;
    on.changed.notify_all();
  }
  members.clear();  // with the lock: transfers leave the engine's lists
}

Result check(const std::vector<Member>& members) {
  Communicators& all = engine().communicators;
  for (const Member& member : members) {
    const Communicator& on = *member.communicator;
    if (on.blocking != members.front().communicator->blocking) {
      return all.refuse(Result::invalid_usage, "a group has blocking and non-blocking communicators");
    }
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

Result launch_all(Lock& lock, std::vector<Member> members) {
  if (const Result wrong = check(members); wrong != Result::success) return wrong;
  const Issue issue = Issue::now();
  Random& random = members.front().communicator->random;
  const bool blocking = members.front().communicator->blocking;
  const bool ready = std::all_of(members.begin(), members.end(), connected);
  if (!blocking && (!ready || random.below(100) < engine().knobs.in_progress)) {
    for (const Member& member : members) member.communicator->state = Result::in_progress;
    count_deferred(members, 1);
    std::thread(launch_later, std::move(members), issue, engine().delay(random)).detach();
    return Result::in_progress;
  }
  if (!ready) connect(lock, members);
  Result result = Result::success;
  for (Member& member : members) {
    Communicator& on = *member.communicator;
    if (on.aborted()) {
      result = Result::internal_error;
    } else if (on.state != Result::success) {
      result = on.state;
    } else {
      launch(member, issue);
    }
  }
  return result;
}

}  // namespace

Result group_start() {
  ++group.depth;
  return Result::success;
}

Result group_end(Lock& lock) {
  if (group.depth == 0) {
    return engine().communicators.refuse(Result::invalid_usage, "ncclGroupEnd without ncclGroupStart");
  }
  if (--group.depth != 0) return Result::success;
  std::vector<Member> members = std::exchange(group.members, {});
  const Result error = std::exchange(group.error, Result::success);
  if (error != Result::success || members.empty()) return error;
  return launch_all(lock, std::move(members));
}

Result transfer(Lock& lock, const char* name, const void* data, std::size_t count, int type, int peer,
                nccl::CommunicatorHandle communicator, cuda::StreamHandle stream) {
  Communicators& all = engine().communicators;
  const auto collect = [&] {
    Result result = Result::success;
    const std::shared_ptr<Communicator> on = all.usable(communicator, result);
    if (!on) return result;
    if (size_of_type(type) == 0) return all.refuse(Result::invalid_argument, "no such data type");
    if (peer < 0 || peer >= on->size) return all.refuse(Result::invalid_argument, "no such peer");
    if (data == nullptr && count != 0) return all.refuse(Result::invalid_argument, "no buffer");
    if (Streams::is_host(stream)) {
      return all.refuse(Result::invalid_argument, "the emulator runs no NCCL kernels on stream 0, the host itself");
    }
    const std::shared_ptr<Stream> target = engine().streams.find(stream);
    if (!target) return Result::invalid_argument;
    Member& member = member_of(on);
    member.transfers.push_back(std::make_unique<Transfer>(*on, name, data, count * size_of_type(type), peer, *target));
    if (std::find(member.streams.begin(), member.streams.end(), target) == member.streams.end()) {
      member.streams.push_back(target);
    }
    return Result::success;
  };
  group_start();
  const Result result = collect();
  if (result != Result::success && group.error == Result::success) group.error = result;
  if (group.depth == 1) return group_end(lock);
  (void)group_end(lock);
  return result;
}

}  // namespace pypipe::emulator
