#include "kernel.hpp"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

namespace pypipe::emulator {

Transfer::Transfer(Communicator& on, const char* name, const void* data, std::size_t bytes, int with,
                   const Stream& stream)
    : communicator(on), peer(with) {
  fault = engine().faults.issued();
  if (fault == Injected::size && bytes != 0) --bytes;
  buffer.access.range = range_of(data, bytes);
  buffer.access.write = std::strcmp(name, "ncclRecv") == 0;
  buffer.access.name = name;
  buffer.access.where = stream.name;
  buffer.access.sequence = engine().next_sequence();
  buffer.access.site = Call::site();
  buffer.data = static_cast<std::byte*>(const_cast<void*>(data));
  buffer.bytes = bytes;
  engine().memory.pend(buffer);
  communicator.buffers.insert(&buffer);
}

Transfer::~Transfer() {
  engine().memory.done(buffer);
  communicator.buffers.erase(&buffer);
}

std::string Transfer::describe() const {
  return std::string(buffer.access.name) + " #" + std::to_string(buffer.access.sequence) + " of " +
         std::to_string(buffer.bytes) + " bytes";
}

Kernel::Kernel(std::shared_ptr<Communicator> communicator, std::vector<std::unique_ptr<Transfer>> transfers,
               const Issue& issue)
    : Operation("NCCL kernel", issue),
      communicator_(std::move(communicator)),
      transfers_(std::move(transfers)),
      turn_(communicator_->launched++) {
  for (const auto& transfer : transfers_) {
    transfer->registered = communicator_->registration_of(transfer->buffer.access.range) != nullptr;
    if (transfer->peer == communicator_->rank) continue;
    transfer->index = transfer->sends() ? communicator_->sends++ : communicator_->receives++;
  }
  if (communicator_->ordered) launches()[sequence] = communicator_.get();
}

std::string Kernel::describe() const {
  std::string text;
  for (const auto& transfer : transfers_) text += (text.empty() ? "" : " + ") + transfer->describe();
  return text + " of " + communicator_->name + ", issued by " + emulator::describe(site);
}

void Kernel::run(Stream& stream, Lock& lock) {
  Communicator& on = *communicator_;
  const auto aborted = [&] { return on.aborted(); };
  stream.wait(
      lock, on.changed, [&] { return "its turn on " + on.name + ", which still has to run what came before"; },
      [&] { return on.finished == turn_; });
  if (on.ordered) await_launch(stream, lock);
  take_place(stream, lock);
  const bool serial = engine().knobs.driver < 12030;
  if (!serial) launched();
  engine().streams.leave_connection(*this);
  if (!aborted()) {
    on.running = describe();
    start(stream, lock);
    while (!aborted() && !all_done()) {
      stream.wait(lock, on.changed, [&] { return waits_for(); }, [&] { return aborted() || any_movable(); });
      for (const auto& transfer : transfers_) {
        if (!aborted() && movable(*transfer)) move(*transfer, lock);
      }
    }
    finish(stream);
  }
  give_place(stream);
  if (serial) launched();
  on.finished = turn_ + 1;
  on.changed.notify_all();
}

// With an implicit launch order, kernels start in the order of issue over all communicators.
void Kernel::await_launch(Stream& stream, Lock& lock) {
  const auto& before = launches();
  stream.wait(
      lock, engine().resident_changed,
      [&] {
        return "kernel #" + std::to_string(before.begin()->first) + " of " + before.begin()->second->name +
               ", which comes before it in the launch order";
      },
      [&] { return before.empty() || before.begin()->first >= sequence; });
}

std::map<std::uint64_t, const Communicator*>& Kernel::launches() const {
  return engine().contexts.devices.at(static_cast<std::size_t>(communicator_->device)).launches;
}

void Kernel::launched() {
  if (launches().erase(sequence) != 0) engine().resident_changed.notify_all();
}

// All accesses count from here on, whenever the bytes move. A send's clock does not cover the group's
// receives.
void Kernel::start(Stream& stream, Lock& lock) {
  for (const bool sends : {true, false}) {
    for (const auto& transfer : transfers_) {
      if (transfer->sends() != sends) continue;
      if (transfer->fault == Injected::die) {
        engine().reports.note("injected: the process dies at " + transfer->describe());
        ::kill(::getpid(), SIGKILL);
      }
      stream.clock.tick(stream.actor);
      happen(stream, transfer->buffer.access);
      transfer->clock = stream.clock;
      transfer->stuck = transfer->fault == Injected::error || transfer->fault == Injected::hang;
      if (transfer->fault == Injected::error) {
        communicator_->fail(nccl::Result::remote_error, "injected at " + transfer->describe());
      }
    }
  }
  start_self(lock);
  for (const auto& transfer : transfers_) {
    if (transfer->sends() || transfer->done) continue;
    if (engine().knobs.scribble) std::memset(transfer->buffer.data, poison, transfer->buffer.bytes);
    if (transfer->stuck) continue;
    const Frame ready{FrameKind::ready, transfer->index, transfer->buffer.bytes, false, false, {}, {}};
    lock.unlock();
    communicator_->wire.write(ready);
    lock.lock();
  }
}

// Sends to oneself meet their receives inside the group, in order.
void Kernel::start_self(Lock& lock) {
  std::vector<Transfer*> sends;
  std::vector<Transfer*> receives;
  for (const auto& transfer : transfers_) {
    if (transfer->peer == communicator_->rank) (transfer->sends() ? sends : receives).push_back(transfer.get());
  }
  for (std::size_t i = 0; i < sends.size() && i < receives.size(); ++i) {
    if (sends[i]->stuck || receives[i]->stuck) continue;
    if (sends[i]->buffer.bytes != receives[i]->buffer.bytes) {
      mismatch(*receives[i], sends[i]->buffer.bytes, lock);
      sends[i]->stuck = true;
      continue;
    }
    compare_registrations(*receives[i], sends[i]->registered);
    Buffer& to = receives[i]->buffer;
    Buffer& from = sends[i]->buffer;
    to.copying = from.copying = true;
    lock.unlock();
    std::memmove(to.data, from.data, to.bytes);
    lock.lock();
    engine().memory.copied(to);
    engine().memory.copied(from);
    sends[i]->done = receives[i]->done = true;
  }
}

void Kernel::finish(Stream& stream) {
  for (const auto& transfer : transfers_) {
    if (transfer->done || transfer->sends()) continue;
    std::memset(transfer->buffer.data, poison, transfer->buffer.bytes);  // aborted in the middle
  }
  stream.clock.join(gained_);
  note_uses(stream);
  communicator_->clock.join(stream.clock);
  communicator_->running.clear();
}

bool Kernel::movable(const Transfer& transfer) const {
  if (transfer.done || transfer.stuck || transfer.peer == communicator_->rank) return false;
  if (!transfer.sends()) return communicator_->arrived.count(transfer.index) != 0;
  return communicator_->ready.count(transfer.index) != 0 || transfer.buffer.bytes == 0 ||
         communicator_->staged + transfer.buffer.bytes <= engine().knobs.staging;
}

bool Kernel::any_movable() const {
  return std::any_of(transfers_.begin(), transfers_.end(), [this](const auto& one) { return movable(*one); });
}

bool Kernel::all_done() const {
  return std::all_of(transfers_.begin(), transfers_.end(), [](const auto& one) { return one->done; });
}

std::string Kernel::waits_for() const {
  std::string text;
  for (const auto& transfer : transfers_) {
    if (transfer->done) continue;
    if (!text.empty()) text += ", and ";
    if (transfer->stuck) {
      text += "nothing: " + transfer->describe() + " failed and waits for ncclCommAbort";
    } else if (transfer->sends()) {
      text += "the peer's receive, or room in the staging buffer (" + std::to_string(communicator_->staged) + " of " +
              std::to_string(engine().knobs.staging) + " bytes taken), for " + transfer->describe();
    } else {
      text += "the peer's send for " + transfer->describe();
    }
  }
  return text;
}

void Kernel::move(Transfer& transfer, Lock& lock) {
  transfer.sends() ? send(transfer, lock) : receive(transfer, lock);
  ++engine().progress;
}

void Kernel::send(Transfer& transfer, Lock& lock) {
  Communicator& on = *communicator_;
  const auto ready = on.ready.find(transfer.index);
  const bool stages = ready == on.ready.end();
  const std::uint64_t expected = stages ? transfer.buffer.bytes : ready->second;
  if (stages) {
    on.staged += transfer.buffer.bytes;
    on.unmatched.insert(transfer.index);
  } else {
    on.ready.erase(ready);
  }
  Buffer& from = transfer.buffer;
  Frame frame{FrameKind::data, transfer.index, from.bytes, stages, transfer.registered, transfer.clock, {}};
  from.copying = true;
  lock.unlock();
  on.wire.write(frame, from.data, from.bytes);
  lock.lock();
  engine().memory.copied(from);
  if (expected != from.bytes) {
    mismatch(transfer, expected, lock);
    return;
  }
  transfer.done = true;
}

void Kernel::receive(Transfer& transfer, Lock& lock) {
  Communicator& on = *communicator_;
  const auto at = on.arrived.find(transfer.index);
  const Frame message = std::move(at->second);
  on.arrived.erase(at);
  if (message.bytes != transfer.buffer.bytes) {
    mismatch(transfer, message.bytes, lock);
    return;
  }
  compare_registrations(transfer, message.registered);
  Buffer& to = transfer.buffer;
  to.copying = true;
  lock.unlock();
  if (to.bytes != 0) std::memcpy(to.data, message.payload.data(), to.bytes);
  if (message.flag) on.wire.write({FrameKind::taken, transfer.index, message.bytes, false, false, {}, {}});
  lock.lock();
  engine().memory.copied(to);
  gained_.join(message.clock);
  transfer.done = true;
}

// "If one rank passes registered memory all must, otherwise the behaviour is undefined" (documentation of
// ncclCommRegister, 2.19). Over a network the receiver then posts one receive for the whole, where the sender sends
// chunks (src/transport/net.cc).
void Kernel::compare_registrations(const Transfer& receive, bool sent_from_registered) const {
  if (receive.registered == sent_from_registered || receive.buffer.bytes == 0) return;
  engine().reports.hazard("registered", "registered memory at one end only, the " +
                                            std::string(receive.registered ? "receiving" : "sending") + " one, on " +
                                            communicator_->name + ": " + emulator::describe(receive.buffer.access));
}

void Kernel::note_uses(const Stream& stream) {
  for (const auto& transfer : transfers_) {
    Registration* const registration = communicator_->registration_of(transfer->buffer.access.range);
    if (registration == nullptr) continue;
    std::erase_if(registration->uses, [&](Epoch use) { return use.actor == stream.actor; });
    registration->uses.push_back({stream.actor, stream.clock.of(stream.actor)});
  }
}

// The real library hangs or writes nonsense. This one says what is wrong, and hangs until an abort.
void Kernel::mismatch(Transfer& transfer, std::uint64_t peers, Lock& lock) {
  const std::string text = emulator::describe(transfer.buffer.access) + ": " + transfer.describe() + " met a " +
                           (transfer.sends() ? "receive" : "send") + " of " + std::to_string(peers) + " bytes on " +
                           communicator_->name;
  engine().reports.hazard("size", text);
  transfer.stuck = true;
  communicator_->fail(nccl::Result::internal_error, text);
  lock.unlock();
  communicator_->wire.write({FrameKind::fault, 0, 0, false, false, {}, {}});
  lock.lock();
}

}  // namespace pypipe::emulator
