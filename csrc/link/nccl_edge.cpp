#include "link/nccl_edge.hpp"

#include <utility>

#include "base/error.hpp"

namespace pypipe {

NcclEdge::NcclEdge(cuda::ApiPointer cuda, NcclPointer nccl, const nccl::UniqueId& id, Side side, std::string name,
                   const NcclOptions& options, const Patience& patience)
    : cuda_(std::move(cuda)), nccl_(std::move(nccl)), name_(std::move(name)), stream_(cuda_), events_(cuda_) {
  cuda_->check(cuda_->context_get_current(&context_));
  nccl::CommunicatorOptions chosen;
  chosen.min_ctas = options.min_ctas;
  chosen.max_ctas = options.max_ctas;
  chosen.name = name_.c_str();
  chosen.launch_order_implicit = nccl_->version() >= nccl::encode_version(2, 31, 0);
  nccl::Config config = nccl::make_config(nccl_->version(), chosen);
  const int rank = side == Side::sender ? 0 : 1;
  try {
    nccl_->check(nccl_->comm_init_rank_config(&communicator_, 2, id, rank, &config));
    nccl::settle(*nccl_, communicator_, "ncclCommInitRankConfig", patience);
    connect(side, patience);
  } catch (...) {
    abort();
    throw;
  }
}

NcclEdge::~NcclEdge() { abort(); }

void NcclEdge::connect(Side side, const Patience& patience) {
  // The first use of an edge connects it and blocks the host until the other end does the same. Better now, where all
  // ranks go through their edges in one order, than in the middle of a step.
  cuda::Pointer word = 0;
  cuda_->check(cuda_->memory_allocate(&word, sizeof(std::uint64_t)));
  const auto release = [this](const cuda::Pointer* pointer) { (void)cuda::succeeded(cuda_->memory_free(*pointer)); };
  const std::unique_ptr<cuda::Pointer, decltype(release)> owner(&word, release);
  auto* const data = reinterpret_cast<void*>(word);  // NOLINT(performance-no-int-to-ptr)
  run(
      [&](nccl::CommunicatorHandle communicator, cuda::StreamHandle stream) {
        nccl_->check(side == Side::sender
                         ? nccl_->send(data, sizeof(std::uint64_t), nccl::uint8, 1, communicator, stream)
                         : nccl_->receive(data, sizeof(std::uint64_t), nccl::uint8, 0, communicator, stream));
      },
      patience);
  cuda_->check(cuda_->stream_synchronize(stream_.handle()));
  reap();
}

std::uint64_t NcclEdge::run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue,
                            const Patience& patience) {
  const std::scoped_lock lock(mutex_);
  if (aborted_) throw Error(Fault::aborted, name_ + ": the communicator was aborted");
  enqueue(communicator_, stream_.handle());
  Patience listening = patience;
  listening.interruption = [this, &patience] {
    if (aborting_) throw Error(Fault::aborted, name_ + ": the communicator is being aborted");
    if (patience.interruption) patience.interruption();
  };
  nccl::settle(*nccl_, communicator_, "ncclSend or ncclRecv", listening);
  cuda::Event ended = events_.take();
  ended.record(stream_.handle());
  operations_.push_back({std::move(ended), std::chrono::steady_clock::now()});
  return ++started_;
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

std::optional<std::string> NcclEdge::watch(std::chrono::steady_clock::duration limit) {
  const std::scoped_lock lock(mutex_);
  if (aborted_) return std::nullopt;
  try {
    cuda_->check(cuda_->context_set_current(context_));
    nccl::Result result = nccl::Result::success;
    nccl_->check(nccl_->comm_get_async_error(communicator_, &result));
    nccl_->check(result, name_.c_str());
    reap();
  } catch (const Error& error) {
    return error.what();
  }
  if (operations_.empty() || std::chrono::steady_clock::now() - operations_.front().since < limit) {
    return std::nullopt;
  }
  return name_ +
         ": a transfer did not end before the deadline; the other end has not started its part, or the device "
         "is stuck";
}

void NcclEdge::abort() noexcept {
  aborting_ = true;
  const std::scoped_lock lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  if (communicator_ != nullptr) (void)nccl::succeeded(nccl_->comm_abort(communicator_));
  communicator_ = nullptr;
}

void NcclEdge::close(const Patience& patience) noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    if (aborted_) return;
    for (void* handle : registrations_) nccl_->check(nccl_->comm_deregister(communicator_, handle));
    registrations_.clear();
    nccl_->check(nccl_->comm_finalize(communicator_));
    nccl::settle(*nccl_, communicator_, "ncclCommFinalize", patience);
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
