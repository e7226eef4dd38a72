// The knobs: control.h says what they mean. Read and written under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pypipe::emulator {

struct Knobs {
  std::uint64_t seed = 0;
  std::uint64_t delay_us = 200;
  std::uint64_t staging = 65536;
  std::uint64_t resident = 32;
  std::uint64_t connections = 0;
  bool lazy = true;
  std::uint64_t in_progress = 10;
  bool death_is_told = false;
  bool scribble = true;
  std::uint64_t hang_ms = 60000;
  bool exit_on_hazard = false;
  std::string report;
  int version = 0;
  int driver = 13000;
  bool separate_threads = false;
  bool lazy_loading = false;
  bool default_stream_queues = false;
  bool main_has_context = true;
  std::uint64_t devices = 1;
  std::uint64_t multiprocessors = 132;

  // The environment's. An unknown value ends the process: a knob that is not understood tests nothing.
  static Knobs of_environment();

  // False for an unknown name or a value that is none.
  bool set(const std::string& name, const std::string& value);
};

// A small generator of its own for each stream and communicator, so that their choices don't depend on each
// other.
class Random {
 public:
  explicit Random(std::uint64_t seed = 0) noexcept : state_(seed) {}
  std::uint64_t next() noexcept {  // splitmix64
    state_ += 0x9e3779b97f4a7c15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31U);
  }
  std::uint64_t below(std::uint64_t bound) noexcept { return bound == 0 ? 0 : next() % bound; }

 private:
  std::uint64_t state_;
};

}  // namespace pypipe::emulator
