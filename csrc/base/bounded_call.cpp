#include "base/bounded_call.hpp"

#include <pthread.h>

#include <atomic>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/thread.hpp"

namespace pypipe {

// The thread writes `thrown`, then `ended` (release), and rings; the waiter reads `ended` (acquire), then `thrown`.
struct BoundedCall::State {
  Doorbell bell;
  std::atomic<bool> ended{false};
  std::exception_ptr thrown;
};

BoundedCall::BoundedCall(std::function<void()> call) : state_(std::make_shared<State>()) {
  try {
    start_thread([state = state_, held = std::move(call)]() mutable {
      pthread_setname_np(pthread_self(), "pypipe-call");
      try {
        held();
      } catch (...) {
        state->thrown = std::current_exception();
      }
      held = nullptr;  // what it owns is gone before anybody hears of the end
      state->ended.store(true, std::memory_order_release);
      notify(state->bell);
    }).detach();
  } catch (const std::system_error& error) {
    throw Error(Fault::system, std::string("a thread cannot be started: ") + error.what());
  }
}

void BoundedCall::wait(const WaitPolicy& policy, const std::string& what) {
  const auto ready = [this] { return ended(); };
  if (!await(state_->bell, policy, ready, [] {})) throw Error(Fault::timeout, what + " did not end in time");
  if (state_->thrown) std::rethrow_exception(std::exchange(state_->thrown, nullptr));
}

bool BoundedCall::ended() const noexcept { return state_->ended.load(std::memory_order_acquire); }

}  // namespace pypipe
