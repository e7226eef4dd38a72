#include "contexts.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include "engine.hpp"

namespace pypipe::emulator {
namespace {

constexpr std::uintptr_t first = 0x4400000000000010U;
constexpr std::uintptr_t distance = 0x1000;

struct Current {
  bool known = false;
  cuda::Context context = nullptr;
};

thread_local Current current_context;

}  // namespace

cuda::Context Contexts::primary(int device) noexcept {
  return reinterpret_cast<cuda::Context>(first + static_cast<std::uintptr_t>(device) * distance);
}

int Contexts::device_of(cuda::Context context) noexcept {
  for (int device = 0; device < most_devices; ++device) {
    if (primary(device) == context) return device;
  }
  return -1;
}

cuda::Context Contexts::current() {
  if (!current_context.known) {
    const bool main = ::syscall(SYS_gettid) == ::getpid();
    set_current(main && engine().knobs.main_has_context ? primary(0) : nullptr);
  }
  return current_context.context;
}

void Contexts::set_current(cuda::Context context) { current_context = {true, context}; }

int Contexts::device() {
  const cuda::Context context = current();
  return context == nullptr ? 0 : device_of(context);
}

bool Contexts::checked() {
  if (current() != nullptr) return true;
  engine().reports.hazard("context", Engine::thread_name() + " has no current context: " + describe(Call::site()));
  return false;
}

}  // namespace pypipe::emulator
