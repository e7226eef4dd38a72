#include "knobs.hpp"

#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "contexts.hpp"

namespace pypipe::emulator {
namespace {

constexpr std::array names{"seed",         "delay_us",    "staging", "resident",       "connections",
                           "lazy",         "in_progress", "death",   "scribble",       "hang_ms",
                           "on_hazard",    "report",      "version", "driver",         "threads",
                           "lazy_loading", "context",     "devices", "default_stream", "multiprocessors"};

bool number(const std::string& text, std::uint64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

bool release(const std::string& text, int& value) {
  std::uint64_t wanted = 0;
  if (!number(text, wanted) || wanted > 99999) return false;
  value = static_cast<int>(wanted);
  return true;
}

bool either(const std::string& text, const char* no, const char* yes, bool& value) {
  if (text != no && text != yes) return false;
  value = text == yes;
  return true;
}

}  // namespace

bool Knobs::set(const std::string& name, const std::string& value) {
  if (name == "seed") return number(value, seed);
  if (name == "delay_us") return number(value, delay_us);
  if (name == "staging") return number(value, staging);
  if (name == "resident") return number(value, resident) && resident > 0;
  if (name == "connections") return number(value, connections);
  if (name == "lazy") return either(value, "0", "1", lazy);
  if (name == "in_progress") return number(value, in_progress) && in_progress <= 100;
  if (name == "death") return either(value, "silent", "error", death_is_told);
  if (name == "scribble") return either(value, "0", "1", scribble);
  if (name == "hang_ms") return number(value, hang_ms);
  if (name == "on_hazard") return either(value, "report", "exit", exit_on_hazard);
  if (name == "report") {
    report = value;
    return true;
  }
  if (name == "version") return release(value, version);
  if (name == "driver") return release(value, driver);
  if (name == "threads") return either(value, "together", "separate", separate_threads);
  if (name == "lazy_loading") return either(value, "0", "1", lazy_loading);
  if (name == "default_stream") return either(value, "host", "queue", default_stream_queues);
  if (name == "context") return either(value, "none", "main", main_has_context);
  if (name == "devices") return number(value, devices) && devices >= 1 && devices <= most_devices;
  if (name == "multiprocessors") return number(value, multiprocessors);
  return false;
}

Knobs Knobs::of_environment() {
  Knobs knobs;
  for (const char* name : names) {
    std::string variable = "PYPIPE_EMULATOR_";
    for (const char* letter = name; *letter != 0; ++letter) {
      variable += *letter >= 'a' && *letter <= 'z' ? static_cast<char>(*letter - 'a' + 'A') : *letter;
    }
    const char* value = std::getenv(variable.c_str());
    if (value == nullptr || knobs.set(name, value)) continue;
    std::fprintf(stderr, "pypipe emulator: %s=%s means nothing\n", variable.c_str(), value);
    std::_Exit(98);
  }
  return knobs;
}

}  // namespace pypipe::emulator
