#include "link/nccl/nccl_edge.hpp"

#include <utility>

#include "base/error.hpp"

namespace pypipe {

NcclEdge::NcclEdge(cuda::GpuPointer gpu, NcclPointer nccl, const nccl::UniqueId& id, int rank, Direction direction,
                   std::string name, int ctas)
    : gpu_(std::move(gpu)),
      nccl_(std::move(nccl)),
      id_(id),
      direction_(direction),
      size_(direction == Direction::to_itself ? 1 : 2),
      rank_(rank),
      name_(std::move(name)),
      ctas_(ctas),
      stream_(*gpu_),
      events_(gpu_) {}

void NcclEdge::make() {
  nccl::Config config = nccl::make_config(nccl_->version(), {1, ctas_, name_.c_str()});
  nccl_->check(nccl_->comm_init_rank_config(&communicator_, size_, id_, rank_, &config));
}

void NcclEdge::greet(std::uint64_t* words) {
  constexpr std::size_t size = sizeof(std::uint64_t);
  const bool all = direction_ != Direction::one_way;
  if (all || rank_ == 0) {
    nccl_->check(nccl_->send(words, size, nccl::uint8, peer(), communicator_, stream_.handle()));
  }
  if (all || rank_ == 1) {
    nccl_->check(nccl_->receive(words + 1, size, nccl::uint8, peer(), communicator_, stream_.handle()));
  }
}

std::uint64_t NcclEdge::run(const std::function<void(nccl::CommunicatorHandle, cuda::StreamHandle)>& enqueue) {
  std::optional<cuda::Event> mark;
  nccl::CommunicatorHandle communicator = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    if (aborting_ || communicator_ == nullptr) throw Error(Fault::aborted, name_ + ": the communicator was aborted");
    in_call_ = true;
    communicator = communicator_;
    mark = events_.spare();  // one that has to be made is made without the lock
  }
  try {
    enqueue(communicator, stream_.handle());
    if (!mark) mark.emplace(*gpu_);
    mark->record(stream_.handle());
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    in_call_ = false;
    called_.notify_all();
    if (aborting_) throw Error(Fault::aborted, name_ + ": the communicator was aborted");
    throw;
  }
  const std::scoped_lock lock(mutex_);
  in_call_ = false;
  called_.notify_all();
  operations_.push_back({*std::move(mark), std::chrono::steady_clock::now()});
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
  const cuda::Current current(*gpu_);
  const std::scoped_lock lock(mutex_);
  reap();
  return started_ - operations_.size();
}

void NcclEdge::hold_up(cuda::StreamHandle stream, std::uint64_t operation) {
  cuda::EventHandle mark = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    const std::uint64_t ended = started_ - operations_.size();
    if (operation <= ended) return;
    mark = operations_[operation - ended - 1].ended.handle();
  }
  // If the operation ends meanwhile, its event is spare; only run() records it again, and this is run()'s thread.
  cuda()->check(cuda()->stream_wait_event(stream, mark, 0));
}

std::optional<NcclEdge::Problem> NcclEdge::watch(std::chrono::steady_clock::duration limit) {
  try {
    nccl::Result result = nccl::Result::success;
    if (communicator_ != nullptr) nccl_->check(nccl_->comm_get_async_error(communicator_, &result));
    nccl_->check(result, name_.c_str());
    const std::scoped_lock lock(mutex_);
    reap();
    if (operations_.empty() || std::chrono::steady_clock::now() - operations_.front().since < limit) {
      return std::nullopt;
    }
  } catch (const Error& error) {
    return Problem{error.what()};
  }
  return Problem{"a transfer of " + name_ + " did not end", true};
}

void NcclEdge::restart_timer() {
  const std::scoped_lock lock(mutex_);
  if (!operations_.empty()) operations_.front().since = std::chrono::steady_clock::now();
}

void NcclEdge::mark_aborting() noexcept {
  const std::scoped_lock lock(mutex_);
  aborting_ = true;
}

bool NcclEdge::is_aborting() noexcept {
  const std::scoped_lock lock(mutex_);
  return aborting_;
}

void NcclEdge::wait_for_calls(std::chrono::steady_clock::time_point deadline) noexcept {
  std::unique_lock lock(mutex_);
  called_.wait_until(lock, deadline, [this] { return !in_call_; });
}

nccl::CommunicatorHandle NcclEdge::take_communicator() noexcept {
  const std::scoped_lock lock(mutex_);
  return std::exchange(communicator_, nullptr);
}

}  // namespace pypipe
