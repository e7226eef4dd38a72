#include "monitor.hpp"

#include <chrono>
#include <string>
#include <thread>

#include "communicator.hpp"
#include "engine.hpp"
#include "streams.hpp"

namespace pypipe::emulator {
namespace {

using std::chrono::steady_clock;

std::string what_waits() {
  Engine& all = engine();
  std::string text = all.streams.describe();
  for (const HostWait& wait : all.host_waits) {
    text += "\n    " + wait.thread + " in " + describe(wait.site) + "\n        waits for " + wait.what;
  }
  return text + all.communicators.describe();
}

[[noreturn]] void watch() {
  std::uint64_t seen = 0;
  bool reported = false;
  steady_clock::time_point since = steady_clock::now();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    const Lock lock(engine().mutex);
    Engine& all = engine();
    const bool waiting = all.streams.waiting() || !all.host_waits.empty();
    if (all.exiting || !waiting || all.progress != seen) {
      seen = all.progress;
      since = steady_clock::now();
      reported = false;
      continue;
    }
    const auto limit = std::chrono::milliseconds(all.knobs.hang_ms);
    if (all.knobs.hang_ms == 0 || reported || steady_clock::now() - since < limit) continue;
    reported = true;
    all.reports.hazard("hang", "nothing has moved for " + std::to_string(all.knobs.hang_ms) + " ms" + what_waits());
  }
}

}  // namespace

void start_monitor() { std::thread(watch).detach(); }

}  // namespace pypipe::emulator
