// How an exported function begins: it says who called, and takes the engine's lock.
#pragma once

#include "engine.hpp"

#define PYPIPE_EMULATOR_ENTER()                                               \
  const ::pypipe::emulator::Call call(__func__, __builtin_return_address(0)); \
  [[maybe_unused]] ::pypipe::emulator::Lock lock(::pypipe::emulator::engine().mutex)
