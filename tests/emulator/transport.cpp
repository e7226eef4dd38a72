#include "transport.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

namespace pypipe::emulator {
namespace {

constexpr std::array<char, 8> magic{'P', 'Y', 'P', 'E', 'M', 'U', '1', 0};

struct Hello {
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t version = 0;
};

struct Answer {
  std::int32_t result = 0;
  std::array<char, 124> problem{};
};

struct Header {
  std::uint32_t kind = 0;
  std::uint32_t flag = 0;
  std::uint64_t index = 0;
  std::uint64_t bytes = 0;
  std::uint64_t clock = 0;
  std::uint64_t payload = 0;
};

bool read_all(int fd, void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes != 0) {
    const ssize_t got = ::recv(fd, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes != 0) {
    const ssize_t put = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    at += put;
    bytes -= static_cast<std::size_t>(put);
  }
  return true;
}

sockaddr_un address_of(const nccl::UniqueId& id, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const char* name = id.internal + magic.size();
  const std::size_t letters = ::strnlen(name, sizeof id.internal - magic.size() - 1);
  std::memcpy(address.sun_path + 1, name, std::min(letters, sizeof address.sun_path - 2));
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + letters);
  return address;
}

void reply(int fd, const Answer& answer, int passed) {
  iovec bytes{const_cast<Answer*>(&answer), sizeof answer};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (passed >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &passed, sizeof passed);
  }
  (void)::sendmsg(fd, &message, MSG_NOSIGNAL);
}

// What is wrong with the ranks that have come, or nothing.
std::string objection(const std::vector<Hello>& hellos) {
  for (const Hello& hello : hellos) {
    if (hello.version != hellos[0].version) {
      return "Mismatched NCCL version detected: rank " + std::to_string(hellos[0].rank) + " version " +
             std::to_string(hellos[0].version) + ", rank " + std::to_string(hello.rank) + " version " +
             std::to_string(hello.version);
    }
    if (hello.size != hellos[0].size) return "the ranks disagree about the communicator's size";
    if (&hello != hellos.data() && hello.rank == hellos[0].rank) return "two ranks have the same number";
  }
  return {};
}

void serve(const Fd& listener) {
  std::vector<Fd> ranks;
  std::vector<Hello> hellos;
  std::size_t size = 1;
  while (ranks.size() < size) {
    Fd rank(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello;
    if (!rank) return;
    if (!read_all(rank.get(), &hello, sizeof hello)) continue;
    size = hello.size == 2 ? 2 : 1;
    ranks.push_back(std::move(rank));
    hellos.push_back(hello);
  }
  Answer answer;
  const std::string problem = objection(hellos);
  if (!problem.empty()) {
    answer.result = static_cast<std::int32_t>(nccl::Result::invalid_usage);
    std::snprintf(answer.problem.data(), answer.problem.size(), "%s", problem.c_str());
  }
  std::array<int, 2> pair{-1, -1};
  if (size == 2 && problem.empty()) {
    (void)::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data());
  }
  const Fd one(pair[0]);
  const Fd other(pair[1]);
  for (std::size_t i = 0; i < ranks.size(); ++i) reply(ranks[i].get(), answer, pair.at(i));
}

}  // namespace

void Wire::write(const Frame& frame, const std::byte* payload, std::size_t bytes) {
  Header header;
  header.kind = static_cast<std::uint32_t>(frame.kind);
  header.flag = (frame.flag ? 1U : 0U) | (frame.registered ? 2U : 0U);
  header.index = frame.index;
  header.bytes = frame.bytes;
  header.clock = frame.clock.entries().size();
  header.payload = bytes;
  const std::lock_guard<std::mutex> turn(writing_);
  if (!socket_) return;
  (void)(write_all(socket_.get(), &header, sizeof header) &&
         write_all(socket_.get(), frame.clock.entries().data(), header.clock * sizeof(Clock::Entry)) &&
         write_all(socket_.get(), payload, bytes));
}

bool Wire::read(Frame& frame) {
  Header header;
  if (!read_all(socket_.get(), &header, sizeof header)) return false;
  frame.kind = static_cast<FrameKind>(header.kind);
  frame.flag = (header.flag & 1U) != 0;
  frame.registered = (header.flag & 2U) != 0;
  frame.index = header.index;
  frame.bytes = header.bytes;
  std::vector<Clock::Entry> entries(header.clock);
  if (!read_all(socket_.get(), entries.data(), entries.size() * sizeof(Clock::Entry))) return false;
  frame.clock = Clock::from(std::move(entries));
  frame.payload.resize(header.payload);
  return read_all(socket_.get(), frame.payload.data(), header.payload);
}

void Wire::shut() const noexcept {
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
}

nccl::Result make_unique_id(nccl::UniqueId& id, std::string& problem) {
  static std::atomic<unsigned> made{0};
  std::random_device chance;  // for the name alone: it must be new on this machine
  std::memset(&id, 0, sizeof id);
  std::memcpy(id.internal, magic.data(), magic.size());
  std::snprintf(id.internal + magic.size(), sizeof id.internal - magic.size(), "pypipe-emulator-%d-%u-%08x%08x",
                static_cast<int>(::getpid()), ++made, chance(), chance());
  Fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = address_of(id, length);
  if (!listener || ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), 8) != 0) {
    problem = std::string("the id's listener: ") + std::strerror(errno);
    return nccl::Result::system_error;
  }
  std::thread([held = std::move(listener)] { serve(held); }).detach();
  return nccl::Result::success;
}

Fd call_listener(const nccl::UniqueId& id, std::string& problem) {
  if (std::memcmp(id.internal, magic.data(), magic.size()) != 0) {
    problem = "this unique id was not made by ncclGetUniqueId";
    return {};
  }
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = address_of(id, length);
  if (socket && ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return socket;
  problem = std::string("nobody listens at the unique id (it serves one communicator, in its maker's lifetime): ") +
            std::strerror(errno);
  return {};
}

Meeting meet(int listener, int rank, int size, int version) {
  Meeting meeting;
  const Hello hello{rank, size, version};
  Answer answer;
  iovec bytes{&answer, sizeof answer};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = -1;
  if (write_all(listener, &hello, sizeof hello)) {
    do {
      got = ::recvmsg(listener, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
  }
  if (got != static_cast<ssize_t>(sizeof answer)) {
    meeting.result = nccl::Result::system_error;
    meeting.problem = "the maker of the unique id is gone";
    return meeting;
  }
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    int passed = -1;
    std::memcpy(&passed, CMSG_DATA(head), sizeof passed);
    meeting.socket = Fd(passed);
  }
  meeting.result = static_cast<nccl::Result>(answer.result);
  meeting.problem = answer.problem.data();
  return meeting;
}

}  // namespace pypipe::emulator
