// The sends and receives of one group on one communicator, fused into one operation that completes as a
// whole.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator.hpp"
#include "streams.hpp"

namespace pypipe::emulator {

struct Transfer {
  Transfer(Communicator& communicator, const char* name, const void* data, std::size_t bytes, int peer,
           const Stream& stream);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();

  [[nodiscard]] bool sends() const noexcept { return !buffer.access.write; }
  [[nodiscard]] std::string describe() const;

  Communicator& communicator;  // the kernel or the group keeps it
  Buffer buffer;
  int peer;
  Injected fault = Injected::none;
  std::uint64_t index = 0;  // among the sends, or receives, of the communicator; given at launch
  Clock clock;              // of a send: what its receive is ordered after
  bool registered = false;  // its memory, when it was launched
  bool done = false;
  bool stuck = false;  // will never end
};

class Kernel final : public Operation {
 public:
  Kernel(std::shared_ptr<Communicator> communicator, std::vector<std::unique_ptr<Transfer>> transfers,
         const Issue& issue);
  void run(Stream& stream, Lock& lock) override;
  [[nodiscard]] std::string describe() const override;

 private:
  void await_launch(Stream& stream, Lock& lock);
  void launched();
  [[nodiscard]] std::map<std::uint64_t, const Communicator*>& launches() const;
  void start(Stream& stream, Lock& lock);
  void start_self(Lock& lock);
  void finish(Stream& stream);
  [[nodiscard]] bool movable(const Transfer& transfer) const;
  [[nodiscard]] bool any_movable() const;
  [[nodiscard]] bool all_done() const;
  [[nodiscard]] std::string waits_for() const;
  void move(Transfer& transfer, Lock& lock);
  void send(Transfer& transfer, Lock& lock);
  void receive(Transfer& transfer, Lock& lock);
  void compare_registrations(const Transfer& receive, bool sent_from_registered) const;
  void note_uses(const Stream& stream);
  void mismatch(Transfer& transfer, std::uint64_t peers, Lock& lock);

  std::shared_ptr<Communicator> communicator_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
  std::uint64_t turn_;
  Clock gained_;  // from the peer's sends
};

}  // namespace pypipe::emulator
