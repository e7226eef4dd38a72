#include "control/action_log.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "control/frame.hpp"

namespace pypipe {
namespace {

constexpr std::uint64_t record_magic = 0x3230636552795079;  // "yPyRec02"
constexpr std::size_t header_bytes = 256;

std::uint64_t nanoseconds(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t now() noexcept { return nanoseconds(CLOCK_MONOTONIC); }

std::uint64_t age(std::uint64_t time, std::uint64_t at) noexcept { return at > time ? at - time : 1; }

// Ages instead of times, which mean nothing on another host.
ActionEntry aged(ActionEntry entry, std::uint64_t at) noexcept {
  for (std::uint64_t* time : {&entry.start, &entry.ready, &entry.end}) {
    if (*time != 0) *time = age(*time, at);
  }
  return entry;
}

// The file's header and its entries as plain words, as pread() copies them.
struct HeaderCopy {
  std::uint64_t magic;
  std::uint32_t rank;
  std::uint32_t capacity;
  std::uint64_t clock;
  std::uint64_t cause_at;
  std::uint64_t cause_bytes;
  std::uint64_t cursor;
  std::uint64_t step;
  std::uint64_t step_at;
  std::uint64_t busy_since;
  std::uint64_t busy_until;
  std::array<char, sizeof(RankStatus::work)> work;
};

struct EntryCopy {
  std::uint64_t what;
  std::uint64_t step;
  std::uint64_t start;
  std::uint64_t ready;
  std::uint64_t end;

  [[nodiscard]] ActionEntry read() const noexcept {
    return {static_cast<std::uint32_t>(what >> 40),
            static_cast<std::uint32_t>(what >> 32) & 0xff,
            static_cast<std::uint32_t>(what),
            static_cast<std::uint32_t>(step),
            start,
            ready,
            end};
  }
};

bool load(int descriptor, void* into, std::size_t bytes, std::size_t offset) noexcept {
  return ::pread(descriptor, into, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
}

bool load_header(int descriptor, HeaderCopy& header) noexcept {
  return load(descriptor, &header, sizeof(header), 0) && header.magic == record_magic && header.capacity >= 4 &&
         header.capacity <= (1U << 24) && header.cause_at == header_bytes + header.capacity * sizeof(EntryCopy);
}

}  // namespace

// HeaderCopy and EntryCopy are the same to those that read the file: change both.
struct ActionLog::Header {
  std::uint64_t magic;
  std::uint32_t rank;
  std::uint32_t capacity;
  std::uint64_t clock;  // CLOCK_REALTIME less CLOCK_MONOTONIC, nanoseconds
  std::uint64_t cause_at;
  std::atomic<std::uint64_t> cause_bytes;
  std::atomic<std::uint64_t> cursor;
  std::atomic<std::uint64_t> step;
  std::atomic<std::uint64_t> step_at;
  std::atomic<std::uint64_t> busy_since;
  std::atomic<std::uint64_t> busy_until;
  std::array<std::atomic<std::uint64_t>, 12> work;  // text, as words: it may be read at any time
};

struct ActionLog::Entry {
  std::atomic<std::uint64_t> what;  // stage << 40 | kind << 32 | microbatch
  std::atomic<std::uint64_t> step;
  std::atomic<std::uint64_t> start;
  std::atomic<std::uint64_t> ready;
  std::atomic<std::uint64_t> end;

  [[nodiscard]] ActionEntry read() const noexcept {
    return EntryCopy{what.load(std::memory_order_acquire), step.load(std::memory_order_acquire),
                     start.load(std::memory_order_acquire), ready.load(std::memory_order_acquire),
                     end.load(std::memory_order_acquire)}
        .read();
  }
};

ActionLog::ActionLog(int rank, std::uint32_t capacity, const std::string& path)
    : path_(path), process_(::getpid()), bytes_(header_bytes + sizeof(Entry) * std::max(capacity, 4U)) {
  static_assert(sizeof(Header) == sizeof(HeaderCopy) && sizeof(Header) <= header_bytes &&
                sizeof(Entry) == sizeof(EntryCopy) && std::atomic<std::uint64_t>::is_always_lock_free);
  capacity = std::max(capacity, 4U);
  descriptor_ = Fd(path.empty() ? ::memfd_create("pypipe", MFD_CLOEXEC)
                                : ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!descriptor_) throw_errno(path.empty() ? "memfd_create" : "making the record " + path);
  check_errno(::ftruncate(descriptor_.get(), static_cast<off_t>(bytes_)), "ftruncate of a record");
  // Without this, missing room would be a SIGBUS at the first write.
  if (const int failed = ::posix_fallocate(descriptor_.get(), 0, static_cast<off_t>(bytes_)); failed != 0) {
    errno = failed;
    throw_errno("allocating a record");
  }
  void* address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_.get(), 0);
  if (address == MAP_FAILED) throw_errno("mapping a record");
  header_ = new (address) Header{};
  entries_ = reinterpret_cast<Entry*>(static_cast<std::byte*>(address) + header_bytes);
  for (std::uint32_t i = 0; i < capacity; ++i) new (entries_ + i) Entry{};
  header_->rank = static_cast<std::uint32_t>(rank);
  header_->capacity = capacity;
  header_->clock = nanoseconds(CLOCK_REALTIME) - now();
  header_->cause_at = bytes_;
  header_->magic = record_magic;
}

ActionLog::~ActionLog() { ::munmap(header_, bytes_); }

void ActionLog::step() noexcept {
  finish(now());
  header_->step_at.store(now(), std::memory_order_release);
  header_->step.store(++steps_, std::memory_order_release);
}

void ActionLog::finish(std::uint64_t at) noexcept {
  if (!std::exchange(in_progress_, false)) return;
  Entry& entry = entries_[(header_->cursor.load(std::memory_order_relaxed) - 1) % header_->capacity];
  entry.end.store(at, std::memory_order_release);
  if (trace_.size() < trace_capacity_) trace_.push_back(entry.read());
}

void ActionLog::stop() { throw Error(Fault::aborted, "the pipeline has failed"); }

void ActionLog::begin(std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch) {
  const std::uint64_t code = std::uint64_t{stage} << 40 | std::uint64_t{kind & 0xff} << 32 | microbatch;
  const std::uint64_t number = header_->cursor.load(std::memory_order_relaxed);
  const bool failed = has_failed();
  // An action that takes other messages off its link first begins twice: it is the same action.
  if (in_progress_ && entries_[(number - 1) % header_->capacity].what.load(std::memory_order_relaxed) == code) {
    if (failed) stop();
    return;
  }
  const std::uint64_t at = now();
  finish(at);
  if (failed) stop();
  Entry& entry = entries_[number % header_->capacity];
  entry.what.store(code, std::memory_order_release);
  entry.step.store(steps_, std::memory_order_release);
  entry.start.store(at, std::memory_order_release);
  entry.ready.store(0, std::memory_order_release);
  entry.end.store(0, std::memory_order_release);
  header_->cursor.store(number + 1, std::memory_order_release);
  in_progress_ = true;
}

void ActionLog::ready() noexcept {
  if (!in_progress_) return;
  Entry& entry = entries_[(header_->cursor.load(std::memory_order_relaxed) - 1) % header_->capacity];
  entry.ready.store(now(), std::memory_order_release);
}

void ActionLog::end() {
  finish(now());
  if (has_failed()) stop();
}

void ActionLog::start_trace(std::size_t capacity) {
  trace_.clear();
  trace_.reserve(capacity);  // recording an action allocates nothing
  trace_capacity_ = capacity;
}

std::vector<ActionEntry> ActionLog::stop_trace() {
  trace_capacity_ = 0;
  return std::exchange(trace_, {});
}

void ActionLog::set_busy(std::string_view work) noexcept {
  const std::scoped_lock lock(busy_mutex_);
  if (work.empty()) {
    if (header_->busy_since.exchange(0, std::memory_order_acq_rel) != 0) {
      header_->busy_until.store(now(), std::memory_order_release);
    }
    return;
  }
  std::array<char, sizeof(RankStatus::work)> text{};
  const std::string_view clipped = clip(work, text.size() - 1);
  std::memcpy(text.data(), clipped.data(), clipped.size());
  for (std::size_t i = 0; i < header_->work.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i * sizeof(word), sizeof(word));
    header_->work[i].store(word, std::memory_order_relaxed);
  }
  header_->busy_since.store(now(), std::memory_order_release);
}

void ActionLog::set_cause(std::string_view cause, std::uint64_t step) noexcept {
  std::uint64_t expected = never;
  if (!failed_step_.compare_exchange_strong(expected, std::min(step, never - 1), std::memory_order_acq_rel)) return;
  const ssize_t written =
      ::pwrite(descriptor_.get(), cause.data(), cause.size(), static_cast<off_t>(header_->cause_at));
  // Half a cause cannot be decoded: if the disk is full, the record has no cause.
  if (std::cmp_equal(written, cause.size())) header_->cause_bytes.store(cause.size(), std::memory_order_release);
}

std::vector<ActionEntry> ActionLog::actions() const {
  const std::uint64_t capacity = header_->capacity;
  const std::uint64_t seen = header_->cursor.load(std::memory_order_acquire);
  const std::uint64_t first = seen > capacity ? seen - capacity : 0;
  std::vector<ActionEntry> all;
  for (std::uint64_t n = first; n < seen; ++n) all.push_back(entries_[n % capacity].read());
  const std::uint64_t then = header_->cursor.load(std::memory_order_acquire);
  const std::uint64_t overwritten = then >= capacity ? then - capacity + 1 : 0;  // entries below may be torn
  if (overwritten > first) {
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(overwritten, seen) - first));
  }
  return all;
}

RankStatus ActionLog::status() const noexcept {
  return status_in(descriptor_.get()).value_or(RankStatus{header_->rank, 0, 0, 0, {}, {}, 0, 0, {}});
}

void ActionLog::discard() noexcept {
  if (!path_.empty() && process_ == ::getpid()) ::unlink(path_.c_str());  // not when a forked child ends
  path_.clear();
}

std::optional<RankStatus> status_in(int descriptor) noexcept {
  HeaderCopy header{};
  if (!load_header(descriptor, header)) return std::nullopt;
  RankStatus status;
  status.rank = header.rank;
  status.step = static_cast<std::uint32_t>(header.step);
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint64_t cursor = header.cursor;
    std::array<ActionEntry, 2> latest;  // the newest first
    const std::size_t count = std::min<std::uint64_t>(cursor, latest.size());
    for (std::size_t back = 0; back < count; ++back) {
      EntryCopy entry{};
      const std::size_t offset = header_bytes + sizeof(entry) * ((cursor - 1 - back) % header.capacity);
      if (!load(descriptor, &entry, sizeof(entry), offset)) return std::nullopt;
      latest[back] = entry.read();
    }
    if (!load_header(descriptor, header)) return std::nullopt;
    if (header.cursor - cursor + 2 >= header.capacity) continue;  // overwritten meanwhile
    const std::uint64_t at = now();
    const bool running = count > 0 && latest[0].end == 0;
    status.running = running ? 1 : 0;
    if (running) status.now = aged(latest[0], at);
    if (count > (running ? 1U : 0U)) {
      status.completed = 1;
      status.last = aged(latest[running ? 1 : 0], at);
    }
    if (header.busy_until != 0) status.busy_ended = age(header.busy_until, at);
    if (header.busy_since != 0) {
      status.busy = age(header.busy_since, at);
      status.work = header.work;
      status.work.back() = '\0';
    }
    return status;
  }
  return std::nullopt;
}

RecordFile read_record(const std::string& path) {
  const auto refuse = [&](const char* why) -> Error {
    return {Fault::protocol, path + " is not a record of this version of pypipe: " + why};
  };
  const Fd file(check_errno(::open(path.c_str(), O_RDONLY | O_CLOEXEC), ("opening " + path).c_str()));
  HeaderCopy header{};
  if (!load_header(file.get(), header)) throw refuse("its header is another one");
  struct stat status{};
  check_errno(::fstat(file.get(), &status), "fstat of a record");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size < header.cause_at || header.cause_bytes > abort_limit || size - header.cause_at < header.cause_bytes) {
    throw refuse("it is too short");
  }
  RecordFile record;
  record.rank = header.rank;
  record.clock = header.clock;
  std::vector<EntryCopy> entries(header.capacity);
  HeaderCopy after{};
  record.cause.resize(header.cause_bytes);
  if (!load(file.get(), entries.data(), entries.size() * sizeof(EntryCopy), header_bytes) ||
      !load_header(file.get(), after) || after.capacity != header.capacity ||
      !load(file.get(), record.cause.data(), record.cause.size(), header.cause_at)) {
    throw refuse("it was shortened while it was read");
  }
  // The entry before these may be half overwritten.
  const std::uint64_t first = after.cursor >= header.capacity ? after.cursor - header.capacity + 1 : 0;
  for (std::uint64_t n = first; n < header.cursor; ++n) record.actions.push_back(entries[n % header.capacity].read());
  if (header.busy_since != 0) {
    header.work.back() = '\0';
    record.busy = header.work.data();
  }
  return record;
}

}  // namespace pypipe
