// The thread that looks after NCCL: asynchronous errors, transfers that do not end, and the end of the pipeline.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "control/hub.hpp"
#include "link/nccl_edge.hpp"

namespace pypipe {

// Every 50 ms: what any edge reports becomes the pipeline's first cause, and once the pipeline has failed, for whatever
// cause, all edges are aborted, so that no stream and no host call waits for ever. `limit`: see NcclEdge::watch().
class NcclWatchdog {
 public:
  NcclWatchdog(Hub& hub, std::vector<std::shared_ptr<NcclEdge>> edges, std::chrono::nanoseconds limit);
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  ~NcclWatchdog();

  // Stops watching, and takes the communicators down in good order, or aborts them where the pipeline has failed.
  void close(const Patience& patience) noexcept;

 private:
  void run() noexcept;
  void look() noexcept;

  Hub& hub_;
  const std::vector<std::shared_ptr<NcclEdge>> edges_;
  const std::chrono::nanoseconds limit_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace pypipe
