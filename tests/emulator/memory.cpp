#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "communicator.hpp"
#include "engine.hpp"
#include "streams.hpp"

namespace pypipe::emulator {
namespace {

constexpr std::size_t fence = 512;
constexpr std::size_t most_quarantined = std::size_t{64} << 20U;
constexpr unsigned char fence_byte = 0xfd;

// The range of `map` that overlaps, or its end.
std::map<std::uintptr_t, std::size_t>::const_iterator find(const std::map<std::uintptr_t, std::size_t>& map,
                                                           Range range) {
  auto at = map.lower_bound(range.end);
  if (at == map.begin()) return map.end();
  --at;
  return at->first + at->second > range.begin ? at : map.end();
}

bool intact(const unsigned char* bytes) {
  return std::all_of(bytes, bytes + fence, [](unsigned char byte) { return byte == fence_byte; });
}

}  // namespace

void* Memory::allocate(std::size_t bytes) {
  ++allocations_;
  const std::size_t whole = (bytes + 2 * fence + 511) / 512 * 512;
  auto* start = static_cast<unsigned char*>(std::aligned_alloc(512, whole));
  if (start == nullptr) return nullptr;
  std::memset(start, fence_byte, whole);
  std::memset(start + fence, poison, bytes);
  const Range range = range_of(start + fence, bytes);
  live_[range.begin] = bytes;
  devices_[range.begin] = Contexts::device();
  engine().host_access(start + fence, bytes, true, "allocation");
  return start + fence;
}

bool Memory::free(std::unique_lock<std::mutex>& lock, void* data) {
  const auto at = live_.find(reinterpret_cast<std::uintptr_t>(data));
  if (at == live_.end()) return false;
  const std::size_t bytes = at->second;
  const Range range = range_of(data, bytes);
  take_from_pending(lock, range);
  engine().streams.synchronize_device(lock, devices_[range.begin], false);
  if (live_.erase(range.begin) == 0) return false;  // freed by another thread meanwhile
  devices_.erase(range.begin);
  auto* start = static_cast<unsigned char*>(data) - fence;
  if (!intact(start) || !intact(start + fence + bytes)) {
    engine().reports.hazard("bounds", "bytes around an allocation of " + std::to_string(bytes) +
                                          " bytes were overwritten; noticed by " + describe(Call::site()));
  }
  engine().host_access(data, bytes, true, "free");
  std::memset(data, poison, bytes);
  freed_[range.begin] = bytes;
  quarantine_.push_back(range);
  quarantined_ += bytes;
  while (quarantined_ > most_quarantined && quarantine_.size() > 1) {
    const Range oldest = quarantine_.front();
    quarantine_.pop_front();
    quarantined_ -= oldest.end - oldest.begin;
    freed_.erase(oldest.begin);
    std::free(reinterpret_cast<unsigned char*>(oldest.begin) - fence);
  }
  return true;
}

int Memory::device_of(Range range) const {
  const auto at = find(live_, range);
  return at == live_.end() ? -1 : devices_.at(at->first);
}

void Memory::allocated(Range range) {
  for (auto at = find(freed_, range); at != freed_.end(); at = find(freed_, range)) freed_.erase(at);
  for (auto at = find(foreign_, range); at != foreign_.end(); at = find(foreign_, range)) foreign_.erase(at);
  if (!range.empty()) foreign_[range.begin] = range.end - range.begin;
}

void Memory::freed(std::unique_lock<std::mutex>& lock, Range range) {
  if (range.empty()) return;
  take_from_pending(lock, range);
  engine().host_access(reinterpret_cast<const void*>(range.begin), range.end - range.begin, true, "free");
  std::memset(reinterpret_cast<void*>(range.begin), poison, range.end - range.begin);
  const auto at = foreign_.find(range.begin);
  if (at == foreign_.end()) return;
  freed_[at->first] = at->second;
  foreign_.erase(at);
}

void Memory::check(const Access& access) const {
  if (access.range.empty()) return;
  if (find(freed_, access.range) != freed_.end()) {
    engine().reports.hazard("freed", "use after free: " + describe(access));
    return;
  }
  const auto at = find(live_, access.range);
  if (at == live_.end()) return;
  if (at->first <= access.range.begin && access.range.end <= at->first + at->second) return;
  engine().reports.hazard("bounds",
                          describe(access) + " leaves its allocation of " + std::to_string(at->second) + " bytes");
}

void Memory::take_from_pending(std::unique_lock<std::mutex>& lock, Range range) {
  for (;;) {
    const auto busy = std::any_of(pending_.begin(), pending_.end(), [&](const Buffer* buffer) {
      return buffer->copying && buffer->access.range.overlaps(range);
    });
    if (!busy) break;
    copied_.wait(lock);
  }
  for (Buffer* buffer : pending_) {
    if (!buffer->access.range.overlaps(range) || !buffer->substitute.empty() || buffer->moot) continue;
    engine().reports.hazard("freed", "memory was freed by " + describe(Call::site()) +
                                         "\n    while an operation still needs it: " + describe(buffer->access));
    buffer->substitute.assign(buffer->bytes, static_cast<std::byte>(poison));
    buffer->data = buffer->substitute.data();
  }
  engine().communicators.check_registrations(range);
}

}  // namespace pypipe::emulator
