#include "link/shm/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace pypipe {
namespace {

constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;

// Two ends in one process share one mapping: that saves memory, and race checkers, which compare addresses, see both.
struct Mapped {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Segment>> segments;
};

Mapped& mapped() {
  static Mapped all;
  return all;
}

struct stat status_of(int descriptor) {
  struct stat status{};
  check_errno(::fstat(descriptor, &status), "fstat of shared memory");
  return status;
}

}  // namespace

Segment::Segment(Fd descriptor, std::size_t bytes) : descriptor_(std::move(descriptor)), bytes_(bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_.get(), 0);
  if (address == MAP_FAILED) throw_errno("mapping " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<std::byte*>(address);
}

Segment::~Segment() { ::munmap(data_, bytes_); }

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  Fd descriptor(check_errno(::memfd_create("pypipe", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create"));
  const auto length = static_cast<off_t>(bytes);
  check_errno(::ftruncate(descriptor.get(), length), "ftruncate of shared memory");
  // Without this, missing memory would be a SIGBUS at the first write.
  if (::fallocate(descriptor.get(), 0, 0, length) < 0) {
    throw_errno("allocating " + std::to_string(bytes) + " bytes of shared memory");
  }
  check_errno(::fcntl(descriptor.get(), F_ADD_SEALS, size_seals), "sealing shared memory");
  const struct stat status = status_of(descriptor.get());
  std::shared_ptr<Segment> segment(new Segment(std::move(descriptor), bytes));
  Mapped& all = mapped();
  const std::scoped_lock lock(all.mutex);
  std::erase_if(all.segments, [](const auto& entry) { return entry.second.expired(); });
  all.segments[{status.st_dev, status.st_ino}] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(Fd descriptor, std::size_t bytes) {
  // Seals first: a size means something only once it can't change any more.
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & size_seals) != size_seals) {
    throw Error(Fault::protocol, "a peer's shared memory is not sealed");
  }
  const struct stat status = status_of(descriptor.get());
  if (std::cmp_not_equal(status.st_size, bytes)) {
    throw Error(Fault::protocol, "a peer's shared memory has " + std::to_string(status.st_size) + " bytes instead of " +
                                     std::to_string(bytes));
  }
  {
    Mapped& all = mapped();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.segments.find({status.st_dev, status.st_ino});
    if (found != all.segments.end()) {
      if (auto segment = found->second.lock()) return segment;
    }
  }
  return std::shared_ptr<Segment>(new Segment(std::move(descriptor), bytes));
}

}  // namespace pypipe
