#include "control/recorder.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "base/error.hpp"
#include "base/json.hpp"

namespace pypipe {
namespace {

constexpr std::uint64_t record_magic = 0x3130636552795079;  // "yPyRec01"
constexpr std::size_t header_bytes = 256;

std::uint64_t nanoseconds(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t now() noexcept { return nanoseconds(CLOCK_MONOTONIC); }

std::string seconds(std::uint64_t nanoseconds) { return std::to_string(static_cast<double>(nanoseconds) * 1e-9); }

std::string to_json(const Deed& deed, std::uint64_t ago) {
  return R"({"stage":)" + std::to_string(deed.stage) + R"(,"kind":)" + std::to_string(deed.kind) + R"(,"microbatch":)" +
         std::to_string(deed.microbatch) + R"(,"step":)" + std::to_string(deed.step) + R"(,"ready":)" +
         (deed.ready != 0 ? "true" : "false") + R"(,"ago":)" + seconds(ago) + "}";
}

// Ages in place of times, so that they mean something to another host.
Deed aged(Deed deed, std::uint64_t at) noexcept {
  for (std::uint64_t* time : {&deed.start, &deed.ready, &deed.end}) {
    if (*time != 0) *time = at > *time ? at - *time : 1;
  }
  return deed;
}

}  // namespace

// Python reads this too (runtime/record.py): change both.
struct Recorder::Header {
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
  std::array<std::atomic<std::uint64_t>, 12> work;  // text, in words: a reader may come at any time
};

struct Recorder::Entry {
  std::atomic<std::uint64_t> what;  // stage << 40 | kind << 32 | microbatch
  std::atomic<std::uint64_t> step;
  std::atomic<std::uint64_t> start;
  std::atomic<std::uint64_t> ready;
  std::atomic<std::uint64_t> end;

  [[nodiscard]] Deed read() const noexcept {
    const std::uint64_t code = what.load(std::memory_order_acquire);
    Deed deed;
    deed.stage = static_cast<std::uint32_t>(code >> 40);
    deed.kind = static_cast<std::uint32_t>(code >> 32) & 0xff;
    deed.microbatch = static_cast<std::uint32_t>(code);
    deed.step = static_cast<std::uint32_t>(step.load(std::memory_order_acquire));
    deed.start = start.load(std::memory_order_acquire);
    deed.ready = ready.load(std::memory_order_acquire);
    deed.end = end.load(std::memory_order_acquire);
    return deed;
  }
};

Recorder::Recorder(int rank, std::uint32_t capacity, const std::string& path)
    : path_(path), process_(::getpid()), bytes_(header_bytes + sizeof(Entry) * std::max(capacity, 4U)) {
  static_assert(sizeof(Header) <= header_bytes && std::atomic<std::uint64_t>::is_always_lock_free);
  capacity = std::max(capacity, 4U);
  descriptor_ = Fd(path.empty() ? ::memfd_create("pypipe", MFD_CLOEXEC)
                                : ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!descriptor_) throw_errno(path.empty() ? "memfd_create" : "making the record " + path);
  check_errno(::ftruncate(descriptor_.get(), static_cast<off_t>(bytes_)), "ftruncate of a record");
  // Without this, room that is not there would be a SIGBUS at the first write.
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

Recorder::~Recorder() { ::munmap(header_, bytes_); }

void Recorder::step() noexcept {
  finish(now());
  header_->step_at.store(now(), std::memory_order_release);
  header_->step.store(++steps_, std::memory_order_release);
}

void Recorder::finish(std::uint64_t at) noexcept {
  if (!std::exchange(in_progress_, false)) return;
  Entry& entry = entries_[(header_->cursor.load(std::memory_order_relaxed) - 1) % header_->capacity];
  entry.end.store(at, std::memory_order_release);
  if (trace_.size() < trace_capacity_) trace_.push_back(entry.read());
}

void Recorder::stop() { throw Error(Fault::aborted, "the pipeline has failed"); }

void Recorder::begin(std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch) {
  const std::uint64_t code = std::uint64_t{stage} << 40 | std::uint64_t{kind & 0xff} << 32 | microbatch;
  const std::uint64_t number = header_->cursor.load(std::memory_order_relaxed);
  const bool failed = has_failed();
  // An action that first takes other messages off its link goes on.
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

void Recorder::ready() noexcept {
  if (!in_progress_) return;
  Entry& entry = entries_[(header_->cursor.load(std::memory_order_relaxed) - 1) % header_->capacity];
  entry.ready.store(now(), std::memory_order_release);
}

void Recorder::end() {
  finish(now());
  if (has_failed()) stop();
}

void Recorder::start_trace(std::size_t capacity) {
  trace_.clear();
  trace_.reserve(capacity);  // an action that is recorded allocates nothing
  trace_capacity_ = capacity;
}

std::vector<Deed> Recorder::stop_trace() {
  trace_capacity_ = 0;
  return std::exchange(trace_, {});
}

void Recorder::set_busy(std::string_view work) noexcept {
  const std::scoped_lock lock(busy_mutex_);
  if (work.empty()) {
    if (header_->busy_since.exchange(0, std::memory_order_acq_rel) != 0) {
      header_->busy_until.store(now(), std::memory_order_release);
    }
    return;
  }
  std::array<char, sizeof(Activity::work)> text{};
  std::size_t length = std::min(work.size(), text.size() - 1);
  // Not in the middle of a character (UTF-8).
  while (length < work.size() && length > 0 && (static_cast<unsigned char>(work[length]) & 0xC0U) == 0x80U) --length;
  std::memcpy(text.data(), work.data(), length);
  for (std::size_t i = 0; i < header_->work.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i * sizeof(word), sizeof(word));
    header_->work[i].store(word, std::memory_order_relaxed);
  }
  header_->busy_since.store(now(), std::memory_order_release);
}

void Recorder::set_cause(std::string_view cause, std::uint64_t step) noexcept {
  std::uint64_t expected = never;
  if (!failed_step_.compare_exchange_strong(expected, std::min(step, never - 1), std::memory_order_acq_rel)) return;
  const ssize_t written =
      ::pwrite(descriptor_.get(), cause.data(), cause.size(), static_cast<off_t>(header_->cause_at));
  if (written > 0) header_->cause_bytes.store(static_cast<std::uint64_t>(written), std::memory_order_release);
}

std::vector<Deed> Recorder::deeds() const {
  const std::uint64_t capacity = header_->capacity;
  const std::uint64_t seen = header_->cursor.load(std::memory_order_acquire);
  const std::uint64_t first = seen > capacity ? seen - capacity : 0;
  std::vector<Deed> all;
  for (std::uint64_t n = first; n < seen; ++n) all.push_back(entries_[n % capacity].read());
  const std::uint64_t then = header_->cursor.load(std::memory_order_acquire);
  const std::uint64_t overwritten = then >= capacity ? then - capacity + 1 : 0;  // entries below may be torn
  if (overwritten > first) {
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(overwritten, seen) - first));
  }
  return all;
}

Activity Recorder::activity() const noexcept {
  return activity_in(descriptor_.get()).value_or(Activity{header_->rank, 0, 0, 0, {}, {}, 0, 0, {}});
}

void Recorder::discard() noexcept {
  if (!path_.empty() && process_ == ::getpid()) ::unlink(path_.c_str());  // a forked child's end is not ours
  path_.clear();
}

std::optional<Activity> activity_in(int descriptor) noexcept {
  // The raw words, in the order of Header and Entry.
  std::array<std::uint64_t, header_bytes / sizeof(std::uint64_t)> header{};
  enum : std::size_t {
    at_rank = 1,
    at_cursor = 5,
    at_step = 6,
    at_step_time = 7,
    at_busy = 8,
    at_worked = 9,
    at_work = 10
  };
  const auto load = [&](void* into, std::size_t bytes, std::size_t offset) {
    return ::pread(descriptor, into, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
  };
  if (!load(header.data(), header_bytes, 0) || header[0] != record_magic) return std::nullopt;
  const std::uint64_t capacity = header[at_rank] >> 32;
  if (capacity < 4 || capacity > (1U << 24)) return std::nullopt;
  Activity status;
  status.rank = static_cast<std::uint32_t>(header[at_rank]);
  status.step = static_cast<std::uint32_t>(header[at_step]);
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint64_t cursor = header[at_cursor];
    std::array<Deed, 2> latest;  // the newest first
    const std::size_t count = std::min<std::uint64_t>(cursor, latest.size());
    for (std::size_t back = 0; back < count; ++back) {
      std::array<std::uint64_t, 5> words{};
      if (!load(words.data(), sizeof(words), header_bytes + sizeof(words) * ((cursor - 1 - back) % capacity))) {
        return std::nullopt;
      }
      latest[back] = Deed{static_cast<std::uint32_t>(words[0] >> 40),
                          static_cast<std::uint32_t>(words[0] >> 32) & 0xff,
                          static_cast<std::uint32_t>(words[0]),
                          static_cast<std::uint32_t>(words[1]),
                          words[2],
                          words[3],
                          words[4]};
    }
    if (!load(header.data(), header_bytes, 0)) return std::nullopt;
    if (header[at_cursor] - cursor + 2 >= capacity) continue;  // overwritten meanwhile
    const std::uint64_t at = now();
    const bool running = count > 0 && latest[0].end == 0;
    status.running = running ? 1 : 0;
    if (running) status.now = aged(latest[0], at);
    if (count > (running ? 1U : 0U)) {
      status.completed = 1;
      status.last = aged(latest[running ? 1 : 0], at);
    }
    if (header[at_worked] != 0) status.worked = at > header[at_worked] ? at - header[at_worked] : 1;
    if (header[at_busy] != 0) {
      status.busy = at > header[at_busy] ? at - header[at_busy] : 1;
      std::memcpy(status.work.data(), &header[at_work], sizeof(status.work));
      status.work.back() = '\0';
    }
    return status;
  }
  return std::nullopt;
}

std::string to_json(const Activity& status) {
  std::string text = R"({"rank":)" + std::to_string(status.rank) + R"(,"step":)" + std::to_string(status.step);
  text += R"(,"now":)" + (status.running != 0 ? to_json(status.now, status.now.start) : "null");
  text += R"(,"last":)" + (status.completed != 0 ? to_json(status.last, status.last.end) : "null");
  if (status.busy != 0) {
    text += R"(,"busy":)" + quoted(status.work.data()) + R"(,"busy_for":)" + seconds(status.busy);
  }
  return text + "}";
}

}  // namespace pypipe
