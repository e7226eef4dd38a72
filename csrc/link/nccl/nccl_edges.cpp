#include "link/nccl/nccl_edges.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>

#include "base/bounded_call.hpp"
#include "base/error.hpp"

namespace pypipe {
namespace {

// A call of run() that is under way ends by itself, unless the device's queue is full: then only the abort ends it.
constexpr std::chrono::milliseconds for_calls{500};
constexpr int group_aborts = nccl::encode_version(2, 22, 0);

// Two words of device memory for each edge.
class Words {
 public:
  Words(cuda::ApiPointer api, std::size_t edges) : api_(std::move(api)) {
    api_->check(api_->memory_allocate(&pointer_, 2 * edges * sizeof(std::uint64_t)));
  }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  ~Words() { (void)cuda::succeeded(api_->memory_free(pointer_)); }

  [[nodiscard]] std::uint64_t* of(std::size_t edge) const {
    return reinterpret_cast<std::uint64_t*>(pointer_) + 2 * edge;  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  cuda::ApiPointer api_;
  cuda::Pointer pointer_ = 0;
};

// The results of these calls are not looked at: there is nothing to be done about an abort that fails.
void abort_all(const nccl::Api& nccl, const cuda::GpuPointer& gpu,
               const std::vector<nccl::CommunicatorHandle>& handles) {
  if (nccl.version() >= group_aborts) {
    (void)nccl::succeeded(nccl.group_start());
    for (nccl::CommunicatorHandle handle : handles) (void)nccl::succeeded(nccl.comm_abort(handle));
    (void)nccl::succeeded(nccl.group_end());
    return;
  }
  std::vector<std::thread> threads;
  threads.reserve(handles.size());
  for (nccl::CommunicatorHandle handle : handles) {
    threads.emplace_back([&nccl, &gpu, handle] {
      const cuda::Current current(*gpu);
      (void)nccl::succeeded(nccl.comm_abort(handle));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

NcclEdges::Handles NcclEdges::take_all(const Edges& edges, std::chrono::steady_clock::time_point deadline) {
  for (const auto& edge : edges) edge->mark_aborting();
  Handles handles;
  for (const auto& edge : edges) {
    edge->wait_for_calls(deadline);
    if (nccl::CommunicatorHandle handle = edge->take_communicator(); handle != nullptr) handles.push_back(handle);
  }
  return handles;
}

NcclEdges::~NcclEdges() { abort(std::chrono::nanoseconds(0)); }

std::shared_ptr<NcclEdge> NcclEdges::add(const nccl::UniqueId& id, int rank, NcclEdge::Direction direction,
                                         std::string name, int ctas) {
  return edges_.emplace_back(std::make_shared<NcclEdge>(gpu_, nccl_, id, rank, direction, std::move(name), ctas));
}

void NcclEdges::connect(const WaitPolicy& policy) {
  if (edges_.empty()) return;
  BoundedCall call([gpu = gpu_, nccl = nccl_, edges = edges_] {
    const cuda::Current current(*gpu);
    const auto is_given_up = [&] { return edges.front()->is_aborting(); };
    const Words words(gpu->api(), edges.size());  // freed after an abort, since freeing waits for the device
    try {
      nccl->check(nccl->group_start());
      for (const auto& edge : edges) edge->make();
      nccl->check(nccl->group_end());
      if (is_given_up()) throw Error(Fault::aborted, "connecting the communicators was given up");
      nccl->check(nccl->group_start());
      for (std::size_t number = 0; number < edges.size(); ++number) edges[number]->greet(words.of(number));
      nccl->check(nccl->group_end());
      for (const auto& edge : edges) {
        const cuda::Event greeted(*gpu);
        greeted.record(edge->stream().handle());
        while (!greeted.done()) {
          if (const auto problem = edge->watch(std::chrono::hours(1))) throw Error(Fault::system, problem->what);
          if (is_given_up()) throw Error(Fault::aborted, "connecting the communicators was given up");
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
      }
    } catch (...) {
      abort_all(*nccl, gpu, take_all(edges, std::chrono::steady_clock::now()));
      throw;
    }
  });
  try {
    call.wait(policy, "connecting the NCCL communicators");
  } catch (...) {
    for (const auto& edge : edges_) edge->mark_aborting();  // for the thread, if it is still there
    if (!call.ended()) edges_.clear();                      // they are the thread's
    throw;
  }
}

bool NcclEdges::abort(std::chrono::nanoseconds limit) noexcept {
  if (::getpid() != process_) return true;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  try {
    const Handles handles = take_all(edges_, std::min(deadline, std::chrono::steady_clock::now() + for_calls));
    if (handles.empty()) return true;
    BoundedCall call([gpu = gpu_, nccl = nccl_, edges = edges_, handles] {
      const cuda::Current current(*gpu);
      abort_all(*nccl, gpu, handles);
    });
    if (limit.count() <= 0) return false;
    WaitPolicy policy;
    policy.timeout = deadline - std::chrono::steady_clock::now();
    call.wait(policy, "ncclCommAbort");
    return true;
  } catch (...) {
    return false;
  }
}

void NcclEdges::close(const WaitPolicy& policy) {
  // Whoever sets `taken` first destroys the communicators: the thread, or this one where time is up.
  const auto taken = std::make_shared<std::atomic<bool>>(false);
  const Handles handles = take_all(edges_, std::chrono::steady_clock::now());
  if (handles.empty()) return;
  BoundedCall call([gpu = gpu_, nccl = nccl_, edges = edges_, handles, taken] {
    const cuda::Current current(*gpu);
    nccl->check(nccl->group_start());
    for (nccl::CommunicatorHandle handle : handles) nccl->check(nccl->comm_finalize(handle));
    nccl->check(nccl->group_end());
    if (taken->exchange(true)) return;
    for (nccl::CommunicatorHandle handle : handles) nccl->check(nccl->comm_destroy(handle));
  });
  try {
    call.wait(policy, "ncclCommFinalize");
  } catch (...) {
    if (!taken->exchange(true)) {
      const BoundedCall last([gpu = gpu_, nccl = nccl_, edges = edges_, handles] {
        const cuda::Current current(*gpu);
        abort_all(*nccl, gpu, handles);
      });
    }
    throw;
  }
}

}  // namespace pypipe
