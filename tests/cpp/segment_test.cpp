// Segments: sealed, shared, checked, and without a name in the file system. Argument: rounds.
#include "link/shm/segment.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#include "check.hpp"
#include "sockets.hpp"

namespace pypipe::test {
namespace {

Fd copy(int descriptor) { return Fd(check_errno(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0), "dup")); }

Fd memory_file(std::size_t bytes, int seals) {
  Fd file(check_errno(::memfd_create("segment_test", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create"));
  check_errno(::ftruncate(file.get(), static_cast<off_t>(bytes)), "ftruncate");
  if (seals != 0) check_errno(::fcntl(file.get(), F_ADD_SEALS, seals), "seals");
  return file;
}

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find("/memfd:pypipe") != std::string::npos ? 1 : 0;
  return found;
}

void sealed() {
  const auto segment = Segment::create(10'000);
  check_equal(segment->bytes(), std::size_t{10'000}, "bytes");
  check(std::all_of(segment->data(), segment->data() + 10'000, [](std::byte b) { return b == std::byte{0}; }),
        "new memory is zeroed");
  check(::ftruncate(segment->descriptor(), 20'000) < 0 && errno == EPERM, "a peer could grow it");
  check(::ftruncate(segment->descriptor(), 100) < 0 && errno == EPERM, "a peer could shrink it");
  check((::fcntl(segment->descriptor(), F_GETFD) & FD_CLOEXEC) != 0, "it would leak into programs started later");
}

// An allocation that the system refuses is an Error. The test sets a limit for that: asking for more memory than the
// machine has would make the kernel kill other processes.
void too_much() {
  const pid_t child = check_errno(::fork(), "fork");
  if (child == 0) {
    const rlimit most{1 << 20, 1 << 20};
    check_errno(::setrlimit(RLIMIT_FSIZE, &most), "setrlimit");
    std::signal(SIGXFSZ, SIG_IGN);
    (void)Segment::create(1 << 20);
    expect(Fault::system, [] { (void)Segment::create((1 << 20) + 1); }, "more memory than is allowed");
    std::_Exit(0);
  }
  int status = 0;
  check_errno(::waitpid(child, &status, 0), "waitpid");
  check_equal(status, 0, "the status of the child with a limit");
}

void shared() {
  const auto segment = Segment::create(4096);
  const auto same = Segment::attach(copy(segment->descriptor()), 4096);
  check(same == segment && same->data() == segment->data(), "one process, two mappings");
  expect(
      Fault::protocol, [&] { (void)Segment::attach(copy(segment->descriptor()), 8192); },
      "a wrong size, although it is mapped here");

  // The descriptor outlives the segment, like one that is still in a socket.
  auto gone = Segment::create(4096);
  gone->data()[17] = std::byte{42};
  Fd descriptor = copy(gone->descriptor());
  gone.reset();
  const auto again = Segment::attach(std::move(descriptor), 4096);
  check(again->data()[17] == std::byte{42}, "its contents are lost");
}

void refused() {
  constexpr std::size_t bytes = 4096;
  const auto attach = [](Fd descriptor) { (void)Segment::attach(std::move(descriptor), bytes); };
  expect(Fault::protocol, [&] { attach(memory_file(bytes, 0)); }, "no seals");
  expect(Fault::protocol, [&] { attach(memory_file(bytes, F_SEAL_SHRINK)); }, "a peer could grow it");
  expect(Fault::protocol, [&] { attach(memory_file(bytes, F_SEAL_GROW)); }, "a peer could shrink it");
  expect(Fault::protocol, [&] { attach(memory_file(bytes + 1, F_SEAL_SHRINK | F_SEAL_GROW)); }, "too long");
  expect(Fault::protocol, [&] { attach(memory_file(bytes - 1, F_SEAL_SHRINK | F_SEAL_GROW)); }, "too short");
  expect(Fault::protocol, [&] { attach(memory_file(0, F_SEAL_SHRINK | F_SEAL_GROW)); }, "empty");
  attach(memory_file(bytes, F_SEAL_SHRINK | F_SEAL_GROW));

  std::FILE* file = std::tmpfile();
  check(file != nullptr, "tmpfile");
  check_errno(::ftruncate(::fileno(file), bytes), "ftruncate");
  expect(Fault::protocol, [&] { attach(copy(::fileno(file))); }, "a file of the right size");
  (void)std::fclose(file);
  std::array<int, 2> pipe{};
  check_errno(::pipe2(pipe.data(), O_CLOEXEC), "pipe");
  Fd write_end(pipe[1]);
  expect(Fault::protocol, [&] { attach(Fd(pipe[0])); }, "a pipe");
  expect(Fault::protocol, [&] { attach(socket_pair().first); }, "a socket");
  expect(Fault::protocol, [&] { attach(Fd(::open("/dev/zero", O_RDWR | O_CLOEXEC))); }, "a device");
  (void)error_of([&] { attach(Fd()); }, "no descriptor");
  // Also sealed against writing, so it cannot be mapped for writing: an error, not a crash.
  (void)error_of([&] { attach(memory_file(bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)); }, "read-only memory");
}

// A child that attaches through a socket's descriptor shares the memory, both ways.
void processes() {
  std::array<int, 2> there{};
  std::array<int, 2> back{};
  check_errno(::pipe2(there.data(), O_CLOEXEC), "pipe");
  check_errno(::pipe2(back.data(), O_CLOEXEC), "pipe");
  const Fd memory = memory_file(4096, F_SEAL_SHRINK | F_SEAL_GROW);  // not yet known to this process as a segment
  const pid_t child = check_errno(::fork(), "fork");
  const auto segment = Segment::attach(copy(memory.get()), 4096);
  char byte = 0;
  if (child == 0) {
    check(::read(there[0], &byte, 1) == 1 && segment->data()[5] == std::byte{1}, "the child sees nothing");
    segment->data()[6] = std::byte{2};
    check(::write(back[1], "x", 1) == 1, "write");
    std::_Exit(0);
  }
  segment->data()[5] = std::byte{1};
  check(::write(there[1], "x", 1) == 1 && ::read(back[0], &byte, 1) == 1, "the child died");
  check(segment->data()[6] == std::byte{2}, "the parent sees nothing");
  int status = 0;
  check_errno(::waitpid(child, &status, 0), "waitpid");
  check_equal(status, 0, "the child's status");
  for (const int end : {there[0], there[1], back[0], back[1]}) ::close(end);
}

// The size of /dev/shm (64 MB by default in a container; one page here) does not limit segments.
void without_dev_shm() {
  const auto segment = Segment::create(4096);
  std::array<char, 64> target{};
  const std::string link = "/proc/self/fd/" + std::to_string(segment->descriptor());
  check(::readlink(link.c_str(), target.data(), target.size() - 1) > 0, "readlink");
  check(std::string_view(target.data()).starts_with("/memfd:pypipe"), "a segment is no anonymous memory file");
  const pid_t child = check_errno(::fork(), "fork");
  if (child == 0) {
    if (::unshare(CLONE_NEWNS | (::geteuid() == 0 ? 0 : CLONE_NEWUSER)) < 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) < 0 ||
        ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4096") < 0) {
      std::printf("segment_test: no tiny /dev/shm could be mounted here: %s\n", std::strerror(errno));
      (void)std::fflush(stdout);
      std::_Exit(0);
    }
    const auto large = Segment::create(std::size_t{8} << 20);
    std::fill(large->data(), large->data() + large->bytes(), std::byte{7});
    std::_Exit(0);
  }
  int status = 0;
  check_errno(::waitpid(child, &status, 0), "waitpid");
  check_equal(status, 0, "the status of the child with a tiny /dev/shm");
}

void churn(std::uint64_t seed, std::uint64_t rounds) {
  std::vector<std::thread> threads;
  for (std::uint64_t me = 0; me < 3; ++me) {
    threads.emplace_back([=] {
      Random random(seed * 10 + me);
      for (std::uint64_t round = 0; round < rounds; ++round) {
        const std::size_t bytes = 64 * (1 + random.below(200));
        auto segment = Segment::create(bytes);
        std::memcpy(segment->data(), &round, sizeof(round));
        Fd descriptor = copy(segment->descriptor());
        if (random.once_in(2)) segment.reset();  // another thread's next segment may get its number
        const auto attached = Segment::attach(std::move(descriptor), bytes);
        std::uint64_t seen = 0;
        std::memcpy(&seen, attached->data(), sizeof(seen));
        check_equal(seen, round, "another segment was attached");
        check(!segment || attached == segment, "one process, two mappings");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t rounds = argument(count, values, 1, 1000);
  const std::size_t descriptors = open_descriptors();
  begin("one process");
  sealed();
  shared();
  refused();
  begin("two processes");
  processes();
  too_much();
  without_dev_shm();
  begin("threads");
  churn(1, rounds);
  check_equal(mappings(), std::size_t{0}, "mappings at the end");
  check_equal(open_descriptors(), descriptors, "descriptors open at the end");
  std::printf("segment_test: %llu rounds in each of 3 threads\n", static_cast<unsigned long long>(rounds));
}
