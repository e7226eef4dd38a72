#include "control/hub.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/thread.hpp"

namespace pypipe {
namespace {

// Limits for the frames of one peer that nothing has taken yet. A peer that exceeds them is broken: senders wait for
// credits long before.
constexpr std::size_t most_frames = 1 << 16;
constexpr std::size_t most_inbox_bytes = std::size_t{64} << 20;
constexpr std::size_t most_waiting_descriptors = 256;
constexpr std::chrono::milliseconds farewell{500};  // how long to wait for room for an abort or leave frame

enum class Written { all, nothing, half };

// Writes everything, waiting for room with poll(). Gives up when `deadline` passes or `give_up` returns true. Half a
// frame would corrupt all that follows, so a frame that has been begun gets half a second more.
Written write_all(int fd, std::span<const iovec> parts, int descriptor, std::chrono::steady_clock::time_point deadline,
                  const std::function<bool()>& give_up) {
  bool begun = false;
  bool given_up = false;
  std::array<iovec, 2> remaining{};  // a header and a payload
  std::ranges::copy(parts, remaining.begin());
  std::span<iovec> left = std::span(remaining).first(parts.size());
  bool pass_descriptor = descriptor >= 0;
  while (!left.empty()) {
    msghdr message{};
    message.msg_iov = left.data();
    message.msg_iovlen = left.size();
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    if (pass_descriptor) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) throw_errno("writing to a control socket");
      const auto now = std::chrono::steady_clock::now();
      if (!given_up && give_up()) {
        given_up = true;
        deadline = begun ? std::min(deadline, now + farewell) : now;
      }
      if (now >= deadline) return begun ? Written::half : Written::nothing;
      pollfd wait{fd, POLLOUT, 0};
      ::poll(&wait, 1, 50);
      continue;
    }
    pass_descriptor = false;
    begun = true;
    auto done = static_cast<std::size_t>(sent);
    while (!left.empty() && done >= left.front().iov_len) {
      done -= left.front().iov_len;
      left = left.subspan(1);
    }
    if (!left.empty()) {
      left.front().iov_base = static_cast<char*>(left.front().iov_base) + done;
      left.front().iov_len -= done;
    }
  }
  return Written::all;
}

iovec part(const void* data, std::size_t bytes) {
  return {const_cast<void*>(data), bytes};  // sendmsg only reads
}

}  // namespace

Hub::Hub(int rank) : rank_(rank), wake_(check_errno(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {}

Hub::~Hub() { close(); }

void Hub::add_peer(int rank, Fd socket) {
  if (thread_.joinable() || closing_) throw Error(Fault::usage, "add_peer() after start()");
  if (!socket || rank == rank_ || peers_.contains(rank)) {
    throw Error(Fault::usage, "add_peer() wants one connected socket per other rank; rank " + std::to_string(rank));
  }
  check_errno(::fcntl(socket.get(), F_SETFD, FD_CLOEXEC), "fcntl");
  auto peer = std::make_unique<Peer>();
  peer->socket = std::move(socket);
  peers_.emplace(rank, std::move(peer));
}

void Hub::start() {
  if (thread_.joinable() || closing_) throw Error(Fault::usage, "start() twice");
  thread_ = start_thread([this] { run(); });
}

Hub::Peer& Hub::find(int peer) const {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) {
    throw Error(Fault::usage, "rank " + std::to_string(peer) + " is not a neighbour of rank " + std::to_string(rank_));
  }
  return *found->second;
}

void Hub::send(int peer, FrameType type, std::uint32_t channel, std::uint64_t value, std::string_view payload,
               const WaitPolicy& policy, int descriptor) {
  check(peer);
  Peer& to = find(peer);
  const auto header = encode_header(type, channel, value, payload.size());
  const std::array parts{part(header.data(), header.size()), part(payload.data(), payload.size())};
  const auto deadline = std::chrono::steady_clock::now() + policy.timeout;
  bool written = false;
  std::exception_ptr interrupted;
  try {
    const std::scoped_lock lock(to.writing);
    if (closing_) throw Error(Fault::usage, "the control connection of this rank is closed");
    const auto give_up = [&] {
      if (failed_.load(std::memory_order_acquire) || closing_ || to.state != State::present) return true;
      try {
        if (policy.interruption) policy.interruption();
      } catch (...) {
        interrupted = std::current_exception();
      }
      return interrupted != nullptr;
    };
    written = write(to, std::span(parts).first(payload.empty() ? 1 : 2), descriptor, deadline, std::cref(give_up));
    if (interrupted) std::rethrow_exception(interrupted);
  } catch (const Error& error) {
    if (error.fault() != Fault::system) throw;
    // The hub thread reads what the peer sent before its end of the socket closed, which tells the reason.
    WaitPolicy soon = policy;
    soon.timeout = farewell;
    soon.prolong = nullptr;
    (void)await(arrivals_, soon, [] { return false; }, [&] { check(peer); });
    throw Error(Fault::peer_gone, "rank " + std::to_string(peer) + " is gone: " + error.what());
  }
  if (written) return;
  check(peer);
  if (closing_) throw Error(Fault::usage, "the control connection of this rank is closed");
  throw Error(Fault::timeout, "rank " + std::to_string(peer) + " does not read its control socket");
}

std::optional<Frame> Hub::try_take(int peer, FrameType type, std::uint32_t channel) {
  const std::scoped_lock lock(mutex_);
  const auto inbox = inboxes_.find(InboxKey{peer, type, channel});
  if (inbox == inboxes_.end() || inbox->second.empty()) return std::nullopt;
  std::optional<Frame> frame(std::move(inbox->second.front()));
  inbox->second.pop_front();
  if (inbox->second.empty()) inboxes_.erase(inbox);
  Waiting& waiting = peers_.at(peer)->waiting;
  waiting.frames -= 1;
  waiting.bytes -= frame->payload.size();
  waiting.descriptors -= frame->descriptor ? 1 : 0;
  return frame;
}

Frame Hub::take(int peer, FrameType type, std::uint32_t channel, const WaitPolicy& policy) {
  (void)find(peer);
  std::optional<Frame> frame;
  const auto ready = [&] {
    frame = try_take(peer, type, channel);
    return frame.has_value();
  };
  if (!await(arrivals_, policy, ready, [&] { check(peer); }) || !frame) {
    throw Error(Fault::timeout, "nothing came from rank " + std::to_string(peer));
  }
  return *std::move(frame);
}

std::optional<Cause> Hub::cause() const {
  if (!has_failed()) return std::nullopt;
  const std::scoped_lock lock(mutex_);
  return Cause::decode(cause_);
}

void Hub::check(int peer) const {
  if (failed_.load(std::memory_order_acquire)) throw Error(Fault::aborted, "the pipeline has failed");
  if (find(peer).state.load(std::memory_order_acquire) != State::present) {
    throw Error(Fault::peer_gone, "rank " + std::to_string(peer) + " has left the pipeline");
  }
}

void Hub::watch(Doorbell& bell) {
  const std::scoped_lock lock(mutex_);
  bells_.push_back(&bell);
}

void Hub::unwatch(Doorbell& bell) noexcept {
  const std::scoped_lock lock(mutex_);
  std::erase(bells_, &bell);
}

void Hub::ring_all() noexcept {
  ring(arrivals_);
  const std::scoped_lock lock(mutex_);
  for (Doorbell* bell : bells_) ring(*bell);
}

void Hub::abort(const Cause& cause, std::uint64_t step) noexcept { fail(cause.encode(), step, rank_); }

void Hub::fail(std::string_view cause, std::uint64_t step, int except) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    cause_ = cause;
    cause_step_ = step;
    failed_.store(true, std::memory_order_release);
  }
  if (action_log_) action_log_->set_cause(cause, step);
  ring_all();
  for (auto& [rank, peer] : peers_) {
    if (rank != except) tell(*peer, FrameType::abort, step, cause);
  }
}

bool Hub::write(Peer& peer, std::span<const iovec> parts, int descriptor,
                std::chrono::steady_clock::time_point deadline, const std::function<bool()>& give_up) {
  if (peer.torn) return false;
  const Written written = write_all(peer.socket.get(), parts, descriptor, deadline, give_up);
  if (written == Written::half) {  // this direction is at its end, and the peer has to see that
    peer.torn = true;
    ::shutdown(peer.socket.get(), SHUT_WR);
  }
  return written == Written::all;
}

void Hub::tell(Peer& peer, FrameType type, std::uint64_t value, std::string_view payload) noexcept {
  if (peer.state == State::lost) return;
  try {
    const auto header = encode_header(type, 0, value, payload.size());
    const std::array parts{part(header.data(), header.size()), part(payload.data(), payload.size())};
    const std::scoped_lock lock(peer.writing);
    if (!peer.socket) return;
    // A peer that does not read in time learns of it when the socket closes.
    (void)write(peer, std::span(parts).first(payload.empty() ? 1 : 2), -1, std::chrono::steady_clock::now() + farewell,
                [] { return false; });
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the peer is gone, which the reader reports
  }
}

// Sends a frame that may be lost: drops it rather than wait.
void Hub::offer(Peer& peer, FrameType type, std::uint32_t channel, std::uint64_t value, std::string_view payload) {
  if (peer.state == State::lost) return;
  const auto header = encode_header(type, channel, value, payload.size());
  const std::array parts{part(header.data(), header.size()), part(payload.data(), payload.size())};
  const auto deadline = std::chrono::steady_clock::now() + farewell;
  std::unique_lock lock(peer.writing, std::defer_lock);
  for (int attempt = 0; attempt < 20 && !lock.try_lock(); ++attempt)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (!lock.owns_lock() || !peer.socket) return;
  try {
    (void)write(peer, std::span(parts).first(payload.empty() ? 1 : 2), -1, deadline, [] { return true; });
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the peer is gone, which the reader reports
  }
}

void Hub::run() noexcept {
  pthread_setname_np(pthread_self(), "pypipe-control");
  std::vector<pollfd> waits;
  std::vector<std::pair<int, Peer*>> open;
  while (!closing_.load(std::memory_order_acquire)) {
    waits.assign(1, pollfd{wake_.get(), POLLIN, 0});
    open.clear();
    for (auto& [rank, peer] : peers_) {
      if (peer->state == State::lost) continue;  // a peer that has left still forwards what others send
      waits.push_back(pollfd{peer->socket.get(), POLLIN, 0});
      open.emplace_back(rank, peer.get());
    }
    if (::poll(waits.data(), waits.size(), -1) < 0) continue;
    for (std::size_t i = 0; i < open.size(); ++i) {
      if (waits[i + 1].revents == 0) continue;
      const auto& [rank, peer] = open[i];
      std::string how;
      try {
        read(rank, *peer);
        continue;
      } catch (const Error& error) {
        how = error.what();
      } catch (const std::exception&) {
        how = "its frames could not be stored here";
      }
      if (closing_.load(std::memory_order_acquire)) break;  // both ends close at once: not a loss
      // The cause first: a thread that finds the peer gone must find the cause too.
      if (peer->state == State::present) {
        const auto [cause, step] = lost_cause(rank, how);
        fail(cause.encode(), step, rank);
      }
      peer->state = State::lost;
      // A peer that sent garbage is alive and waits for an answer that will not come: it must see the socket end.
      ::shutdown(peer->socket.get(), SHUT_RDWR);
      ring_all();
    }
  }
}

void Hub::read(int rank, Peer& peer) {
  std::array<std::byte, 1 << 16> buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init): recvmsg fills it
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 8)> control{};
  iovec into{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &into;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(peer.socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    throw_errno("reading a control socket");
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      peer.reader.feed(Fd(descriptor));
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(Fault::system, "a descriptor could not be received: this process has too many files open");
  }
  if (got == 0) throw Error(Fault::peer_gone, "its connection closed");
  peer.reader.feed(std::span(buffer).first(static_cast<std::size_t>(got)));
  while (auto frame = peer.reader.next()) {
    dispatch(rank, peer, std::move(*frame));
    if (peer.state == State::lost) return;
  }
}

void Hub::dispatch(int rank, Peer& peer, Frame frame) {
  switch (frame.type) {
    case FrameType::abort:
      (void)Cause::decode(frame.payload);  // throws on bytes that other ranks could not decode
      fail(frame.payload, frame.value, rank);
      return;
    case FrameType::leave:
      peer.state.store(State::left, std::memory_order_release);
      ring_all();
      return;
    case FrameType::ask:
      hear_question(rank, frame);
      return;
    case FrameType::answer:
      hear_answer(frame);
      return;
    case FrameType::record: {
      const std::scoped_lock lock(mutex_);
      peer.record = std::move(frame.descriptor);
      return;
    }
    case FrameType::layout:
    case FrameType::memory:
    case FrameType::envelope:
      break;
  }
  {
    const std::scoped_lock lock(mutex_);
    Waiting& waiting = peer.waiting;
    waiting.frames += 1;
    waiting.bytes += frame.payload.size();
    waiting.descriptors += frame.descriptor ? 1 : 0;
    if (waiting.frames > most_frames || waiting.bytes > most_inbox_bytes ||
        waiting.descriptors > most_waiting_descriptors) {
      throw Error(Fault::protocol, "it sent frames that were not asked for");
    }
    inboxes_[InboxKey{rank, frame.type, frame.channel}].push_back(std::move(frame));
  }
  notify(arrivals_);
}

std::vector<int> Hub::departed() const {
  std::vector<int> ranks;
  for (const auto& [rank, peer] : peers_) {
    if (peer->state != State::present) ranks.push_back(rank);
  }
  return ranks;
}

void Hub::leave() noexcept {
  if (closing_.load(std::memory_order_acquire)) return;
  for (auto& [rank, peer] : peers_) tell(*peer, FrameType::leave, 0, {});
}

void Hub::close() noexcept {
  if (closing_.exchange(true)) return;
  const bool failed = has_failed();  // if so, the cause and its step have been written and do not change any more
  for (auto& [rank, peer] : peers_) {
    // The hub thread may not have forwarded the cause yet, and a leave frame must not arrive in its place.
    if (failed) tell(*peer, FrameType::abort, cause_step_, cause_);
    tell(*peer, FrameType::leave, 0, {});
  }
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  for (auto& [rank, peer] : peers_) {
    const std::scoped_lock lock(peer->writing);
    peer->socket.reset();
    peer->state = State::left;
    const std::scoped_lock inboxes(mutex_);
    peer->record.reset();
  }
  wake_.reset();
  ring_all();
}

void Hub::abandon() noexcept {
  if (closing_.exchange(true)) return;
  // Threads that do not exist in this process may hold the locks, and thread_ names one of them.
  for (auto& [rank, peer] : peers_) {
    peer->socket.reset();
    peer->record.reset();
  }
  wake_.reset();
  if (thread_.joinable()) thread_.detach();
}

}  // namespace pypipe
