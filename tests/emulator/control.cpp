#include "control.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "enter.hpp"
#include "streams.hpp"

using namespace pypipe;
using namespace pypipe::emulator;

namespace {

cuda::StreamHandle handle_of(void* stream) { return static_cast<cuda::StreamHandle>(stream); }

void announce(Lock& lock, const void* data, std::size_t bytes, void* stream, const char* name, bool write) {
  const char* known = engine().intern(name == nullptr ? "compute" : name);
  if (Streams::is_host(handle_of(stream))) {
    engine().host_access(data, bytes, write, known);
    return;
  }
  const auto target = engine().streams.find(handle_of(stream));
  if (!target) return;
  engine().streams.load(lock, target->device, known);
  Access access;
  access.range = range_of(data, bytes);
  access.write = write;
  Streams::append(*target, std::make_unique<LaunchOperation>(known, nullptr, nullptr, std::vector{access}));
}

}  // namespace

extern "C" {

int pypipe_emulator_set(const char* name, const char* value) {
  if (name == nullptr || value == nullptr) return -1;
  PYPIPE_EMULATOR_ENTER();
  if (std::strcmp(name, "fault") == 0) return engine().faults.add(value) ? 0 : -1;
  if (!engine().knobs.set(name, value)) return -1;
  if (std::strcmp(name, "seed") == 0) engine().reseed();
  return 0;
}

int pypipe_emulator_fault(const char* fault) {
  PYPIPE_EMULATOR_ENTER();
  if (fault == nullptr || *fault == 0) {
    engine().faults.clear();
    return 0;
  }
  return engine().faults.add(fault) ? 0 : -1;
}

uint64_t pypipe_emulator_operations(void) {
  PYPIPE_EMULATOR_ENTER();
  return engine().faults.operations();
}

uint64_t pypipe_emulator_hazards(const char* kind) {
  PYPIPE_EMULATOR_ENTER();
  return engine().reports.count(kind);
}

size_t pypipe_emulator_last_report(char* text, size_t bytes) {
  PYPIPE_EMULATOR_ENTER();
  const std::string& last = engine().reports.last();
  if (text != nullptr && bytes != 0) {
    const std::size_t length = std::min(last.size(), bytes - 1);
    std::memcpy(text, last.data(), length);
    text[length] = 0;
  }
  return last.size();
}

uint64_t pypipe_emulator_host_synchronizations(void) {
  PYPIPE_EMULATOR_ENTER();
  return engine().synchronizations;
}

uint64_t pypipe_emulator_allocations(void) {
  PYPIPE_EMULATOR_ENTER();
  return engine().memory.allocations();
}

uint64_t pypipe_emulator_completed(void) {
  PYPIPE_EMULATOR_ENTER();
  return engine().completed;
}

uint64_t pypipe_emulator_checker_nodes(void) {
  PYPIPE_EMULATOR_ENTER();
  return engine().checker.nodes();
}

void pypipe_emulator_reset_counters(void) {
  PYPIPE_EMULATOR_ENTER();
  engine().reports.reset();
  engine().memory.reset_counter();
  engine().synchronizations = 0;
}

void pypipe_emulator_label(const char* label) {
  const Lock lock(engine().mutex);
  Call::label(label == nullptr ? nullptr : engine().intern(label));
}

void pypipe_emulator_name_stream(void* stream, const char* name) {
  PYPIPE_EMULATOR_ENTER();
  const auto target = engine().streams.find(handle_of(stream));
  if (target && name != nullptr) target->name = "stream " + std::to_string(target->number) + " '" + name + "'";
}

void pypipe_emulator_reads(const void* data, size_t bytes, void* stream, const char* name) {
  PYPIPE_EMULATOR_ENTER();
  announce(lock, data, bytes, stream, name, false);
}

void pypipe_emulator_writes(void* data, size_t bytes, void* stream, const char* name) {
  PYPIPE_EMULATOR_ENTER();
  announce(lock, data, bytes, stream, name, true);
}

void pypipe_emulator_allocated(const void* data, size_t bytes) {
  PYPIPE_EMULATOR_ENTER();
  engine().memory.allocated(range_of(data, bytes));
}

void pypipe_emulator_freed(void* data, size_t bytes) {
  PYPIPE_EMULATOR_ENTER();
  engine().memory.freed(lock, range_of(data, bytes));
}

void pypipe_emulator_recycled(void* data, size_t bytes, void* stream) {
  PYPIPE_EMULATOR_ENTER();
  announce(lock, data, bytes, stream, "later use of freed memory", true);
}

void pypipe_emulator_launch(void* stream, const char* name, void (*run)(void*), void* argument,
                            const pypipe_emulator_range* ranges, size_t count) {
  PYPIPE_EMULATOR_ENTER();
  const auto target = engine().streams.find(handle_of(stream));
  if (!target) return;
  std::vector<Access> accesses(count);
  for (size_t i = 0; i < count; ++i) {
    accesses[i].range = range_of(ranges[i].data, ranges[i].bytes);
    accesses[i].write = ranges[i].write != 0;
  }
  const char* known = engine().intern(name == nullptr ? "kernel" : name);
  if (!Contexts::checked() || Contexts::device() != target->device) {
    engine().reports.hazard("context", std::string(known) + " is launched on " + target->name + " of device " +
                                           std::to_string(target->device) + ", which is not the current one");
    return;
  }
  engine().streams.load(lock, target->device, known);
  Streams::append(*target, std::make_unique<LaunchOperation>(known, run, argument, std::move(accesses)));
}

void pypipe_emulator_settle(void* stream) {
  PYPIPE_EMULATOR_ENTER();
  const auto target = engine().streams.find(handle_of(stream));
  if (!target) return;
  const std::shared_ptr<Record> record = Streams::record(*target, Issue::now());
  engine().host_wait(lock, record->changed, "all work of " + target->name, [&] { return record->done; });
}

void pypipe_emulator_join_threads(void) {
  PYPIPE_EMULATOR_ENTER();
  engine().join_threads();
}
}
