// The thread that watches NCCL for asynchronous errors and transfers that do not end, and aborts it when the pipeline
// fails.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "control/hub.hpp"
#include "link/nccl/nccl_edges.hpp"

namespace pypipe {

// Looks every 50 ms. A problem of any edge becomes the pipeline's first cause; once the pipeline has failed, from any
// cause, all edges are aborted, so that no stream and no host call waits for ever. A transfer that takes longer than
// `limit` may go on while one of the `ranks` says that it is busy. Otherwise the cause tells what each rank is doing: a
// host that waits for the device has no other way to report it.
class NcclWatchdog {
 public:
  NcclWatchdog(Hub& hub, std::shared_ptr<NcclEdges> edges, std::chrono::nanoseconds limit, std::size_t ranks);
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  ~NcclWatchdog();

  // Stops watching, tells the peers that this rank leaves, and destroys the communicators, or aborts them if the
  // pipeline has failed or fails meanwhile. When that is done, throws what `policy.interruption` threw.
  void close(const WaitPolicy& policy);

 private:
  void run() noexcept;
  void look();
  [[nodiscard]] Cause overdue(const std::string& what);

  Hub& hub_;
  const std::shared_ptr<NcclEdges> edges_;
  const std::chrono::nanoseconds limit_;
  const std::size_t ranks_;
  bool aborted_ = false;  // the watchdog's own
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace pypipe
