// The thread that looks after NCCL: asynchronous errors, transfers that do not end, and the end of the pipeline.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control/hub.hpp"
#include "link/nccl/nccl_edge.hpp"

namespace pypipe {

// Every 50 ms: what any edge reports becomes the pipeline's first cause, and once the pipeline has failed, for whatever
// cause, all edges are aborted, so that no stream and no host call waits for ever. A transfer that takes longer than
// `limit` is forgiven while one of the `ranks` says that it is busy; else the cause says what each of them is doing,
// for a host that waits for the device hears of nothing but this.
class NcclWatchdog {
 public:
  NcclWatchdog(Hub& hub, std::vector<std::shared_ptr<NcclEdge>> edges, std::chrono::nanoseconds limit,
               std::size_t ranks);
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  ~NcclWatchdog();

  // Stops watching, tells the peers that this rank leaves, and takes the communicators down in good order, or aborts
  // them where the pipeline has failed or now fails.
  // Throws what `patience.interruption` throws, when all is down.
  void close(const Patience& patience);

 private:
  void run() noexcept;
  void look();
  [[nodiscard]] Cause overdue(const std::string& what);

  Hub& hub_;
  const std::vector<std::shared_ptr<NcclEdge>> edges_;
  const std::chrono::nanoseconds limit_;
  const std::size_t ranks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace pypipe
