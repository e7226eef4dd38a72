#include "link/nccl/nccl_edge.hpp"

#include <thread>
#include <utility>

#include "base/error.hpp"

namespace pypipe {
namespace {

// Two words of device memory.
class Words {
 public:
  explicit Words(cuda::ApiPointer api) : api_(std::move(api)) {
    api_->check(api_->memory_allocate(&pointer_, 2 * sizeof(std::uint64_t)));
  }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  ~Words() { (void)cuda::succeeded(api_->memory_free(pointer_)); }

  [[nodiscard]] std::uint64_t* data() const {
    return reinterpret_cast<std::uint64_t*>(pointer_);  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  cuda::ApiPointer api_;
  cuda::Pointer pointer_ = 0;
};

}  // namespace

NcclEdge::NcclEdge(cuda::ApiPointer cuda, NcclPointer nccl, const nccl::UniqueId& id, int rank, Direction direction,
                   std::string name, const NcclOptions& options, const WaitPolicy& policy)
    : cuda_(std::move(cuda)),
      nccl_(std::move(nccl)),
      size_(direction == Direction::to_itself ? 1 : 2),
      rank_(rank),
      name_(std::move(name)),
      stream_(cuda_),
      events_(cuda_) {
  cuda_->check(cuda_->context_get_current(&context_));
  nccl::CommunicatorOptions chosen;
  chosen.min_ctas = options.min_ctas;
  chosen.max_ctas = options.max_ctas;
  chosen.name = name_.c_str();
  chosen.launch_order_implicit = nccl_->version() >= nccl::encode_version(2, 31, 0);
  nccl::Config config = nccl::make_config(nccl_->version(), chosen);
  const Words words(cuda_);  // freed after an abort, since freeing waits for the device
  try {
    nccl_->check(nccl_->comm_init_rank_config(&communicator_, size_, id, rank_, &config));
    nccl::settle(*nccl_, communicator_, "ncclCommInitRankConfig", policy);
    // The first use of an edge connects it and blocks the host until the other end does the same. That is done here,
    // where all ranks go through their edges in one order, rather than in the middle of a step.
    const bool to_itself = direction == Direction::to_itself;
    connect(rank_ == 0, rank_ == 1 || to_itself, words.data(), policy);
    if (direction == Direction::both_ways) connect(rank_ == 1, rank_ == 0, words.data(), policy);
  } catch (...) {
    abort();
    throw;
  }
}

NcclEdge::~NcclEdge() { abort(); }

void NcclEdge::connect(bool sends, bool receives, std::uint64_t* words, const WaitPolicy& policy) {
  constexpr std::size_t size = sizeof(std::uint64_t);
  const std::uint64_t started = run(
      [&](nccl::CommunicatorHandle communicator, cuda::StreamHandle stream) {
        nccl_->check(nccl_->group_start());
        if (sends) nccl_->check(nccl_->send(words, size, nccl::uint8, peer(), communicator, stream));
        if (receives) nccl_->check(nccl_->receive(words + 1, size, nccl::uint8, peer(), communicator, stream));
        nccl_->check(nccl_->group_end());
      },
      policy);
  const auto deadline = std::chrono::steady_clock::now() + policy.timeout;
  while (ended() < started) {
    nccl::settle(*nccl_, communicator_, name_.c_str(), policy);  // throws if an operation failed
    if (std::chrono::steady_clock::now() >= deadline) {
      throw Error(Fault::timeout, name_ + ": connecting did not end in time");
    }
    if (policy.interruption) policy.interruption();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::uint64_t NcclEdge::run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue,
                            const WaitPolicy& policy) {
  const std::scoped_lock lock(mutex_);
  if (aborted_) throw Error(Fault::aborted, name_ + ": the communicator was aborted");
  enqueue(communicator_, stream_.handle());
  settle(policy);
  cuda::Event ended = events_.take();
  ended.record(stream_.handle());
  operations_.push_back({std::move(ended), std::chrono::steady_clock::now()});
  return ++started_;
}

void NcclEdge::settle(const WaitPolicy& policy) {
  constexpr const char* what = "ncclSend or ncclRecv";
  nccl::Result result = nccl::Result::success;
  nccl_->check(nccl_->comm_get_async_error(communicator_, &result));
  if (result != nccl::Result::in_progress) return nccl_->check(result, what);
  WaitPolicy listening = policy;
  listening.interruption = [this, &policy] {
    if (aborting_) throw Error(Fault::aborted, name_ + ": the communicator is being aborted");
    if (policy.interruption) policy.interruption();
  };
  nccl::settle(*nccl_, communicator_, what, listening);
}

void NcclEdge::reap() {
  while (!operations_.empty() && operations_.front().ended.done()) {
    events_.give_back(std::move(operations_.front().ended));
    operations_.pop_front();
    if (!operations_.empty()) operations_.front().since = std::chrono::steady_clock::now();
  }
}

std::uint64_t NcclEdge::ended() {
  const std::scoped_lock lock(mutex_);
  reap();
  return started_ - operations_.size();
}

std::optional<NcclEdge::Problem> NcclEdge::watch(std::chrono::steady_clock::duration limit) {
  const std::scoped_lock lock(mutex_);
  if (aborted_) return std::nullopt;
  try {
    cuda_->check(cuda_->context_set_current(context_));
    nccl::Result result = nccl::Result::success;
    nccl_->check(nccl_->comm_get_async_error(communicator_, &result));
    nccl_->check(result, name_.c_str());
    reap();
  } catch (const Error& error) {
    return Problem{error.what()};
  }
  if (operations_.empty() || std::chrono::steady_clock::now() - operations_.front().since < limit) {
    return std::nullopt;
  }
  return Problem{"a transfer of " + name_ + " did not end", true};
}

void NcclEdge::restart_timer() {
  const std::scoped_lock lock(mutex_);
  if (!operations_.empty()) operations_.front().since = std::chrono::steady_clock::now();
}

void NcclEdge::abort() noexcept {
  aborting_ = true;
  const std::scoped_lock lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  if (communicator_ != nullptr) (void)nccl::succeeded(nccl_->comm_abort(communicator_));
  communicator_ = nullptr;
}

void NcclEdge::begin_close() noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    if (aborted_) return;
    for (void* handle : registrations_) nccl_->check(nccl_->comm_deregister(communicator_, handle));
    registrations_.clear();
    nccl_->check(nccl_->comm_finalize(communicator_));
  } catch (...) {
    abort();
  }
}

void NcclEdge::end_close(const WaitPolicy& policy) noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    if (aborted_) return;
    nccl::settle(*nccl_, communicator_, "ncclCommFinalize", policy);
    nccl_->check(nccl_->comm_destroy(std::exchange(communicator_, nullptr)));
    aborted_ = true;
  } catch (...) {
    abort();
  }
}

void* NcclEdge::register_memory(void* data, std::size_t bytes) {
  if (!nccl_->comm_register) return nullptr;
  const std::scoped_lock lock(mutex_);
  if (aborted_) return nullptr;
  void* handle = nullptr;
  nccl_->check(nccl_->comm_register(communicator_, data, bytes, &handle));
  if (handle != nullptr) registrations_.insert(handle);
  return handle;
}

void NcclEdge::deregister_memory(void* handle) noexcept {
  const std::scoped_lock lock(mutex_);
  if (registrations_.erase(handle) == 0 || aborted_) return;
  (void)nccl::succeeded(nccl_->comm_deregister(communicator_, handle));
}

}  // namespace pypipe
