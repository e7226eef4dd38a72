// What lies in streams besides records, waits and NCCL's kernels: copies and kernels of tests.
#include <cstring>
#include <thread>
#include <utility>

#include "streams.hpp"

namespace pypipe::emulator {
namespace {

Buffer buffer_of(const Operation& operation, const void* data, std::size_t bytes, bool write,
                 const std::string& where) {
  Buffer buffer;
  buffer.access.range = range_of(data, bytes);
  buffer.access.write = write;
  buffer.access.name = operation.name;
  buffer.access.where = where;
  buffer.access.sequence = operation.sequence;
  buffer.access.site = operation.site;
  buffer.data = static_cast<std::byte*>(const_cast<void*>(data));
  buffer.bytes = bytes;
  return buffer;
}

}  // namespace

void happen(Stream& stream, Access& access) {
  access.epoch = {stream.actor, stream.clock.of(stream.actor)};
  engine().memory.check(access);
  engine().checker.access(access, stream.clock);
}

void take_place(Stream& stream, Lock& lock) {
  Engine& all = engine();
  std::uint64_t& resident = all.contexts.devices.at(static_cast<std::size_t>(stream.device)).resident;
  stream.wait(
      lock, all.resident_changed,
      [&] { return "a place on the device, all of whose " + std::to_string(resident) + " are taken"; },
      [&] { return resident < all.knobs.resident; });
  ++resident;
}

void give_place(const Stream& stream) {
  --engine().contexts.devices.at(static_cast<std::size_t>(stream.device)).resident;
  engine().resident_changed.notify_all();
}

CopyOperation::CopyOperation(void* target, const void* source, std::size_t bytes, const std::string& where)
    : Operation("copy", Issue::now()),
      target_(buffer_of(*this, target, bytes, true, where)),
      source_(buffer_of(*this, source, bytes, false, where)) {
  engine().memory.pend(target_);
  engine().memory.pend(source_);
}

CopyOperation::~CopyOperation() {
  engine().memory.done(target_);
  engine().memory.done(source_);
}

void CopyOperation::run(Stream& stream, Lock& lock) {
  engine().streams.leave_connection(*this);
  happen(stream, source_.access);
  happen(stream, target_.access);
  source_.copying = target_.copying = true;
  lock.unlock();
  std::memmove(target_.data, source_.data, target_.bytes);
  lock.lock();
  engine().memory.copied(source_);
  engine().memory.copied(target_);
}

LaunchOperation::LaunchOperation(const char* called, void (*function)(void*), void* argument,
                                 std::vector<Access> accesses)
    : Operation(called, Issue::now()), function_(function), argument_(argument), accesses_(std::move(accesses)) {
  for (Access& access : accesses_) {
    access.name = called;
    access.sequence = sequence;
    access.site = site;
  }
}

void LaunchOperation::run(Stream& stream, Lock& lock) {
  Engine& all = engine();
  if (function_ != nullptr) {
    take_place(stream, lock);
    all.streams.leave_connection(*this);
  }
  for (Access& access : accesses_) {
    access.where = stream.name;
    happen(stream, access);
  }
  if (function_ == nullptr) return;
  lock.unlock();
  function_(argument_);
  lock.lock();
  give_place(stream);
}

}  // namespace pypipe::emulator
