#include "streams.hpp"

#include <cstring>
#include <thread>
#include <utility>

namespace pypipe::emulator {
namespace {

class RecordOperation final : public Operation {
 public:
  RecordOperation(std::shared_ptr<Record> record, const Issue& issue)
      : Operation("event record", issue), record_(std::move(record)) {}
  void run(Stream& stream, Lock& /*lock*/) override {
    record_->clock = stream.clock;
    record_->done = true;
    record_->changed.notify_all();
  }

 private:
  std::shared_ptr<Record> record_;
};

class WaitOperation final : public Operation {
 public:
  WaitOperation(std::shared_ptr<Record> record, const Issue& issue)
      : Operation("event wait", issue), record_(std::move(record)) {}
  void run(Stream& stream, Lock& lock) override {
    stream.wait(
        lock, record_->changed, [&] { return "the event recorded on " + record_->where; },
        [&] { return record_->done; });
    engine().streams.leave_connection(*this);
    stream.clock.join(record_->clock);
  }

 private:
  std::shared_ptr<Record> record_;
};

}  // namespace

Operation::Operation(const char* called, const Issue& issue)
    : name(called), site(issue.site), sequence(engine().next_sequence()), issued(issue.clock) {}

std::string Operation::describe() const {
  return std::string(name) + " #" + std::to_string(sequence) + ", issued by " + emulator::describe(site);
}

namespace {

bool is_default(cuda::StreamHandle handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle) <= 2; }

}  // namespace

bool Streams::is_host(cuda::StreamHandle handle) noexcept {
  return is_default(handle) && !engine().knobs.default_stream_queues;
}

cuda::StreamHandle Streams::create() { return make("")->handle; }

std::shared_ptr<Stream> Streams::make(const std::string& name) {
  auto stream = std::make_shared<Stream>();
  stream->handle = reinterpret_cast<cuda::StreamHandle>(0x5700000000000000U + ++handles_ * 16);
  stream->number = ++created_;
  stream->name = name.empty() ? "stream " + std::to_string(stream->number) : name;
  stream->device = Contexts::device();
  stream->actor = engine().new_actor();
  stream->clock = engine().issue();
  stream->random = engine().new_random();
  streams_[stream->handle] = stream;
  std::thread([this, stream] { work(stream); }).detach();
  return stream;
}

bool Streams::destroy(cuda::StreamHandle handle) {
  if (is_default(handle)) return false;
  const std::shared_ptr<Stream> stream = find(handle);
  if (!stream) return false;
  stream->destroyed = true;
  stream->changed.notify_all();
  return true;
}

std::shared_ptr<Stream> Streams::find(cuda::StreamHandle handle) {
  if (is_default(handle) && engine().knobs.default_stream_queues) {
    auto& stream = defaults_[Contexts::device()];
    if (!stream) stream = make("the default stream");
    return stream;
  }
  const auto at = streams_.find(handle);
  if (at != streams_.end() && !at->second->destroyed) return at->second;
  engine().reports.hazard("usage", "no such stream (it may have been destroyed): " + emulator::describe(Call::site()));
  return nullptr;
}

void Streams::append(Stream& stream, std::unique_ptr<Operation> operation) {
  if (stream.capture) return;  // captured, and forgotten
  ++stream.issued;
  engine().streams.expect_connection(stream, *operation);
  stream.queue.push_back(std::move(operation));
  stream.changed.notify_all();
}

void Streams::work(const std::shared_ptr<Stream>& stream) {
  Lock lock(engine().mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return (!stream->queue.empty() || stream->destroyed) && !engine().exiting; });
    if (stream->queue.empty()) break;
    const std::unique_ptr<Operation> operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->current = operation.get();
    if (const auto pause = engine().delay(stream->random); pause.count() != 0) {
      lock.unlock();
      std::this_thread::sleep_for(pause);
      lock.lock();
    }
    enter_connection(*stream, *operation, lock);
    stream->clock.join(operation->issued);
    stream->clock.tick(stream->actor);
    operation->run(*stream, lock);
    leave_connection(*operation);
    stream->current = nullptr;
    ++stream->completed;
    ++engine().completed;
    ++engine().progress;
  }
  streams_.erase(stream->handle);
}

cuda::EventHandle Streams::create_event() {
  const auto handle = reinterpret_cast<cuda::EventHandle>(0x4500000000000000U + ++handles_ * 16);
  events_[handle] = std::make_shared<Event>();
  events_[handle]->device = Contexts::device();
  return handle;
}

bool Streams::destroy_event(cuda::EventHandle handle) {
  if (!find_event(handle)) return false;
  events_.erase(handle);
  return true;
}

std::shared_ptr<Event> Streams::find_event(cuda::EventHandle handle) {
  const auto at = events_.find(handle);
  if (at != events_.end()) return at->second;
  engine().reports.hazard("usage", "no such event (it may have been destroyed): " + emulator::describe(Call::site()));
  return nullptr;
}

std::shared_ptr<Record> Streams::record(Stream& stream, const Issue& issue) {
  auto record = std::make_shared<Record>();
  auto operation = std::make_unique<RecordOperation>(record, issue);
  record->where = stream.name + " by " + operation->describe();
  append(stream, std::move(operation));
  return record;
}

void Streams::wait(Stream& stream, const std::shared_ptr<Record>& record, const Issue& issue) {
  append(stream, std::make_unique<WaitOperation>(record, issue));
}

void Streams::host_record(Event& event) {
  event.latest = std::make_shared<Record>();
  event.latest->done = true;
  event.latest->where = Engine::thread_name();
  event.latest->clock = engine().issue();
}

void Streams::synchronize(Lock& lock, Stream& stream) {
  const std::shared_ptr<Record> record = Streams::record(stream, Issue::now());
  engine().host_wait(lock, record->changed, "all work of " + stream.name, [&] { return record->done; });
  engine().host().clock.join(record->clock);
}

void Streams::synchronize_device(Lock& lock, int device, bool orders) {
  std::vector<std::shared_ptr<Record>> records;
  for (const auto& [handle, stream] : streams_) {
    if (stream->device != device || stream->issued == stream->completed) continue;
    if (orders) note_deferred(*stream);
    records.push_back(record(*stream, {Call::site(), Clock()}));
  }
  for (const auto& one : records) {
    engine().host_wait(lock, one->changed, "the whole device, so far for " + one->where, [&] { return one->done; });
    if (orders) engine().host().clock.join(one->clock);
  }
}

void Streams::load(Lock& lock, int device, const char* kind) {
  if (!engine().knobs.lazy_loading || !loaded_.emplace(device, kind).second) return;
  synchronize_device(lock, device, false);
}

void Streams::note_deferred(const Stream& stream) {
  if (stream.deferred == 0) return;
  engine().reports.hazard("in_progress",
                          "a non-blocking NCCL call is still in progress on " + stream.name +
                              ", so that its operations are not covered: " + emulator::describe(Call::site()));
}

std::vector<const Clock*> Streams::busy_clocks() const {
  std::vector<const Clock*> clocks;
  for (const auto& [handle, stream] : streams_) {
    if (stream->issued != stream->completed) clocks.push_back(&stream->clock);
  }
  return clocks;
}

bool Streams::waiting() const {
  for (const auto& [handle, stream] : streams_) {
    if (!stream->waits_for.empty()) return true;
  }
  return false;
}

std::string Streams::describe() const {
  std::string text;
  for (const auto& [handle, stream] : streams_) {
    text += "\n    " + stream->name + ": ";
    if (stream->current == nullptr) {
      text += stream->queue.empty() ? "idle" : "about to start";
    } else {
      text += stream->current->describe();
      text += stream->waits_for.empty() ? ", running" : "\n        waits for " + stream->waits_for;
    }
    if (!stream->queue.empty()) {
      text += "\n        behind it " + std::to_string(stream->queue.size()) + " more, next " +
              stream->queue.front()->describe();
    }
    if (stream->deferred != 0) text += "\n        a non-blocking call is in progress on it";
  }
  return text;
}

void Streams::leave_capture(const Capture& capture) {
  for (const auto& [handle, stream] : streams_) {
    if (capture.streams.count(handle) != 0) stream->capture.reset();
  }
}

void Streams::reseed() {
  for (const auto& [handle, stream] : streams_) stream->random = engine().new_random();
}

void Streams::expect_connection(const Stream& stream, Operation& operation) {
  const std::uint64_t number = engine().knobs.connections;
  if (number == 0) return;
  operation.connection = 1 + stream.number % number;
  connections_[operation.connection].insert(operation.sequence);
}

void Streams::enter_connection(Stream& stream, const Operation& operation, Lock& lock) {
  if (operation.connection == 0) return;
  const std::set<std::uint64_t>& waiting = connections_[operation.connection];
  stream.wait(
      lock, connections_changed_,
      [&] {
        return "operation #" + std::to_string(*waiting.begin()) +
               ", which came earlier into their common hardware queue, to start";
      },
      [&] { return *waiting.begin() == operation.sequence; });
}

void Streams::leave_connection(const Operation& operation) {
  if (operation.connection == 0) return;
  if (connections_[operation.connection].erase(operation.sequence) != 0) connections_changed_.notify_all();
}

}  // namespace pypipe::emulator
