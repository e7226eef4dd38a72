#include "engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "communicator.hpp"
#include "monitor.hpp"
#include "streams.hpp"

namespace pypipe::emulator {
namespace {

thread_local Site current_site;
thread_local const char* current_label = nullptr;
thread_local bool in_a_call = false;

// A thread that has called. Tells the engine when it ends.
struct Presence {
  std::string name;
  std::shared_ptr<Timeline> timeline;
  Presence() = default;
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;
  ~Presence() {
    if (!timeline) return;
    const Lock lock(engine().mutex);
    engine().forget(timeline);
  }
};

thread_local Presence presence;

void leave() {
  const Lock lock(engine().mutex);
  engine().exiting = true;
}

std::uint64_t rank_of_environment() {
  const char* rank = std::getenv("RANK");
  return rank == nullptr ? 0 : std::strtoull(rank, nullptr, 10) + 1;
}

// As with CUDA itself, a child that was forked after the first use has nothing to use.
std::atomic<bool> forked{false};

void refuse_children() { forked = true; }

}  // namespace

Engine& engine() {
  // Leaked: threads of streams use it until the very end of the process.
  static Engine* const only = [] {
    auto* made = new Engine;
    std::atexit(leave);
    ::pthread_atfork(nullptr, nullptr, refuse_children);
    return made;
  }();
  if (forked.load(std::memory_order_relaxed)) {
    std::fputs("pypipe emulator: used by a child that was forked after the first use\n", stderr);
    std::_Exit(97);
  }
  return *only;
}

Engine::Engine()
    : knobs(Knobs::of_environment()),
      faults(Faults::of_environment()),
      streams(*new Streams),
      communicators(*new Communicators),
      process_(static_cast<Actor>(::getpid()) << 32U) {
  start_monitor();
}

Random Engine::new_random() {
  Random mixer(knobs.seed * 1000003 + rank_of_environment());
  return Random(mixer.next() + ++randoms_ * 0x632be59bd9b4e019U);
}

void Engine::reseed() {
  randoms_ = 0;
  streams.reseed();
}

std::chrono::microseconds Engine::delay(Random& random) const {
  // Mostly none or short, now and then long: all orders of a few neighbours, and some of distant ones.
  const std::uint64_t kind = random.below(10);
  std::uint64_t longest = 0;
  if (kind == 9) {
    longest = knobs.delay_us;
  } else if (kind >= 6) {
    longest = knobs.delay_us / 8;
  }
  return std::chrono::microseconds(random.below(longest + 1));
}

std::string Engine::thread_name() { return presence.timeline ? presence.name : "a background thread"; }

Timeline& Engine::host() {
  if (!presence.timeline) {
    presence.name = "host thread " + std::to_string(++threads_);
    if (!knobs.separate_threads && !timelines_.empty()) {
      presence.timeline = timelines_.front();
    } else {
      presence.timeline = std::make_shared<Timeline>();
      presence.timeline->actor = new_actor();
      timelines_.push_back(presence.timeline);
      join_threads();
      presence.timeline->clock.tick(presence.timeline->actor);
    }
  }
  return *presence.timeline;
}

Clock Engine::issue() {
  Timeline& timeline = host();
  timeline.issues = true;
  Clock now = timeline.clock;
  timeline.clock.tick(timeline.actor);
  return now;
}

void Engine::join_threads() {
  Clock all = departed_;
  for (const auto& timeline : timelines_) all.join(timeline->clock);
  host().clock.join(all);
}

void Engine::join_all_threads(const Clock& clock) {
  for (const auto& timeline : timelines_) timeline->clock.join(clock);
}

void Engine::forget(const std::shared_ptr<Timeline>& timeline) {
  constexpr long held_by_one_thread = 2;  // it and timelines_
  if (timeline.use_count() > held_by_one_thread) return;
  departed_.join(timeline->clock);
  std::erase(timelines_, timeline);
}

void Engine::host_access(const void* data, std::size_t bytes, bool write, const char* name) {
  Timeline& timeline = host();
  timeline.issues = true;
  Access access;
  access.range = range_of(data, bytes);
  access.write = write;
  access.host = true;
  access.name = name;
  access.where = thread_name();
  access.sequence = next_sequence();
  access.site = Call::site();
  access.epoch = {timeline.actor, timeline.clock.of(timeline.actor)};
  memory.check(access);
  checker.access(access, timeline.clock);
}

std::vector<const Clock*> Engine::horizon() {
  std::vector<const Clock*> clocks = streams.busy_clocks();
  for (const auto& timeline : timelines_) {
    if (timeline->issues) clocks.push_back(&timeline->clock);
  }
  return clocks;
}

const char* Engine::intern(const std::string& text) {
  auto& name = names_[text];
  if (!name) name = std::make_unique<std::string>(text);
  return name->c_str();
}

Call::Call(const char* function, const void* caller) noexcept : outermost_(!in_a_call) {
  if (!outermost_) return;
  in_a_call = true;
  current_site = {function, caller, current_label};
}

Call::~Call() {
  if (outermost_) in_a_call = false;
}

Site Call::site() noexcept { return current_site; }

void Call::adopt(const Site& site) noexcept { current_site = site; }

void Call::label(const char* label) noexcept { current_label = label; }

}  // namespace pypipe::emulator
