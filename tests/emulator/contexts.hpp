// Devices and the current context of each thread.
//
// A thread starts without a current context (CUDA driver API, "Context Management"); what needs one is then
// CUDA_ERROR_INVALID_CONTEXT, here also a report. Streams, events and memory belong to the device of the context that
// was current when they were made. The process's first thread is as a program with torch has it, with device 0's
// primary context (knob context).
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "link/nccl/cuda_abi.hpp"

namespace pypipe::emulator {

struct Communicator;

inline constexpr int most_devices = 8;

struct Device {
  std::uint64_t resident = 0;  // places that are taken
  std::uint64_t retained = 0;  // its primary context, by cuDevicePrimaryCtxRetain
  // Kernels of communicators with an implicit launch order that have not started (or, serially, ended), by sequence.
  std::map<std::uint64_t, const Communicator*> launches;
};

class Contexts {
 public:
  [[nodiscard]] static cuda::Context primary(int device) noexcept;
  // -1 for one that is none.
  [[nodiscard]] static int device_of(cuda::Context context) noexcept;
  // Of the calling thread: null where there is none.
  [[nodiscard]] static cuda::Context current();
  static void set_current(cuda::Context context);
  // The device of the current context. NCCL, like the CUDA runtime, takes device 0 where there is none.
  [[nodiscard]] static int device();
  // Whether the thread has a current context; reported if not.
  [[nodiscard]] static bool checked();

  std::array<Device, most_devices> devices;
};

}  // namespace pypipe::emulator
