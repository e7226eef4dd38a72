// FrameReader and Cause::decode() on valid, random, mutated and gigantic input: whole frames and causes or
// Error{protocol}, in bounded memory. Arguments: seed, rounds.
#include "control/frame.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <new>
#include <vector>

#include "check.hpp"
#include "control/cause.hpp"
#include "sockets.hpp"

namespace {
// Bytes on the heap now, and the most since the last reset. Each block is preceded by its size.
std::atomic<std::size_t> live{0};
std::atomic<std::size_t> peak{0};
constexpr std::size_t prefix = alignof(std::max_align_t);
}  // namespace

void* operator new(std::size_t bytes) {
  void* block = std::malloc(bytes + prefix);
  if (block == nullptr) throw std::bad_alloc();
  std::memcpy(block, &bytes, sizeof(bytes));
  const std::size_t now = live += bytes;
  peak = std::max(peak.load(), now);
  return static_cast<char*>(block) + prefix;
}
void operator delete(void* pointer) noexcept {
  if (pointer == nullptr) return;
  void* block = static_cast<char*>(pointer) - prefix;
  std::size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof(bytes));
  live -= bytes;
  std::free(block);
}
void operator delete(void* pointer, std::size_t /*bytes*/) noexcept { operator delete(pointer); }

namespace pypipe::test {
namespace {

constexpr std::array types{FrameType::layout, FrameType::memory, FrameType::envelope, FrameType::abort,
                           FrameType::leave,  FrameType::record, FrameType::ask,      FrameType::answer};

bool carries_descriptor(FrameType type) { return type == FrameType::memory || type == FrameType::record; }

struct Sent {
  FrameType type{};
  std::uint32_t channel = 0;
  std::uint64_t value = 0;
  std::string payload;
  std::size_t end = 0;  // in the stream
  ino_t descriptor = 0;
};

void append(std::string& stream, std::vector<Sent>& sent, Sent frame) {
  const auto header = encode_header(frame.type, frame.channel, frame.value, frame.payload.size());
  stream.append(reinterpret_cast<const char*>(header.data()), header.size());
  stream += frame.payload;
  frame.end = stream.size();
  sent.push_back(std::move(frame));
}

std::string bytes_of(Random& random, std::size_t count) {
  std::string text(count, '\0');
  for (char& c : text) c = static_cast<char>(random.next());
  return text;
}

Sent random_frame(Random& random, bool with_memory) {
  Sent frame;
  do {
    frame.type = types[random.below(types.size())];
  } while (carries_descriptor(frame.type) && !with_memory);
  frame.channel = static_cast<std::uint32_t>(random.next());
  frame.value = random.next();
  const std::size_t most = *limit(frame.type);
  const std::size_t size = random.once_in(50) ? most : random.below(std::min<std::size_t>(most, 2000) + 1);
  frame.payload = bytes_of(random, size);
  return frame;
}

std::span<const std::byte> view(std::string_view text) { return std::as_bytes(std::span(text)); }

void check_same(const Frame& got, const Sent& sent) {
  check(got.type == sent.type && got.channel == sent.channel && got.value == sent.value, "another header came out");
  check(got.payload == sent.payload, "another payload came out");
}

// Feeds `stream` in random pieces. Returns the frames before the end or the first error; sets `refused` on an error.
std::vector<Frame> feed(FrameReader& reader, std::string_view stream, Random& random, bool& refused) {
  std::vector<Frame> frames;
  refused = false;
  while (!stream.empty()) {
    const std::size_t longest = random.once_in(3) ? 5 : std::size_t{1} << 16;
    const std::size_t piece = std::min(stream.size(), 1 + random.below(longest));
    reader.feed(view(stream.substr(0, piece)));
    stream.remove_prefix(piece);
    try {
      while (auto frame = reader.next()) {
        check(frame->payload.size() <= limit(frame->type).value_or(0), "a frame over its limit came out");
        frames.push_back(std::move(*frame));
      }
    } catch (const Error& error) {
      check(error.fault() == Fault::protocol, "bytes of a peer gave another error than Error{protocol}");
      refused = true;
      return frames;
    }
  }
  return frames;
}

void valid(Random& random) {
  FrameReader reader;
  std::string stream;
  std::vector<Sent> sent;
  for (std::size_t count = random.below(40); count > 0; --count) {
    Sent frame = random_frame(random, true);
    if (carries_descriptor(frame.type)) {
      Fd descriptor(check_errno(::memfd_create("frame_test", MFD_CLOEXEC), "memfd_create"));
      struct stat status{};
      check_errno(::fstat(descriptor.get(), &status), "fstat");
      frame.descriptor = status.st_ino;
      reader.feed(std::move(descriptor));
    }
    append(stream, sent, std::move(frame));
  }
  bool refused = false;
  const std::vector<Frame> frames = feed(reader, stream, random, refused);
  check(!refused, "a valid stream was refused");
  check_equal(frames.size(), sent.size(), "frames of a valid stream");
  for (std::size_t i = 0; i < frames.size(); ++i) {
    check_same(frames[i], sent[i]);
    check(static_cast<bool>(frames[i].descriptor) == carries_descriptor(sent[i].type),
          "descriptors go with the frames that carry them, and with no others");
    if (!frames[i].descriptor) continue;
    struct stat status{};
    check_errno(::fstat(frames[i].descriptor.get(), &status), "fstat of a received descriptor");
    check(status.st_ino == sent[i].descriptor, "descriptors came out in another order");
  }
}

void noise(Random& random) {
  FrameReader reader;
  bool refused = false;
  const std::string stream = bytes_of(random, 1 + random.below(5000));
  const std::vector<Frame> frames = feed(reader, stream, random, refused);
  check(frames.empty(), "a frame came out of noise");  // one chance in 2^32 per run of the reader
  check(refused == (stream.size() >= frame_header_bytes), "noise is refused as soon as a header is whole");
}

// One change somewhere: the frames before it must come out unchanged.
void mutated(Random& random) {
  std::string stream;
  std::vector<Sent> sent;
  for (std::size_t count = 1 + random.below(12); count > 0; --count) {
    append(stream, sent, random_frame(random, false));
  }
  const std::size_t at = random.below(stream.size());
  switch (random.below(5)) {
    case 0:
      stream[at] = static_cast<char>(stream[at] ^ (1 << random.below(8)));
      break;
    case 1:
      stream.erase(at, 1 + random.below(40));
      break;
    case 2:
      stream.insert(at, bytes_of(random, 1 + random.below(40)));
      break;
    case 3:
      stream.resize(at);
      break;
    default:  // perhaps a length field
      for (std::size_t i = 0; i < 4 && at + i < stream.size(); ++i) stream[at + i] = static_cast<char>(random.next());
  }
  FrameReader reader;
  bool refused = false;
  const std::vector<Frame> frames = feed(reader, stream, random, refused);
  for (std::size_t i = 0; i < sent.size() && sent[i].end <= at; ++i) {
    check(i < frames.size(), "a frame before the damage is missing");
    check_same(frames[i], sent[i]);
  }
}

Cause random_cause(Random& random) {
  Cause cause;
  cause.kind = static_cast<CauseKind>(random.below(7));
  cause.rank = static_cast<std::int32_t>(random.next());
  cause.call = random.next();
  for (std::string* text : {&cause.call_name, &cause.doing, &cause.type, &cause.message, &cause.traceback}) {
    *text = bytes_of(random, random.below(random.once_in(20) ? std::size_t{1} << 18 : 200));
  }
  cause.reports.resize(random.below(random.once_in(20) ? 4000 : 5));
  return cause;
}

// A cause comes out as it went in; a damaged one is refused, or decoded as a different cause.
void causes(Random& random) {
  std::string bytes = random_cause(random).encode();
  check(bytes.size() <= abort_limit, "a cause that no frame can carry");
  check(Cause::decode(bytes).encode() == bytes, "another cause came out");
  bytes[random.below(bytes.size())] ^= static_cast<char>(1 + random.below(255));
  if (random.once_in(2)) bytes.resize(random.below(bytes.size()));
  try {
    check(Cause::decode(bytes).encode().size() == bytes.size(), "a cause of another size came out");
  } catch (const Error& error) {
    check(error.fault() == Fault::protocol, "a damaged cause gave another error than Error{protocol}");
  }
}

std::string raw_header(std::uint32_t magic, std::uint16_t type, std::uint16_t reserved, std::uint32_t bytes) {
  std::string header(frame_header_bytes, '\0');
  std::memcpy(header.data(), &magic, sizeof(magic));
  std::memcpy(header.data() + 4, &type, sizeof(type));
  std::memcpy(header.data() + 6, &reserved, sizeof(reserved));
  std::memcpy(header.data() + 12, &bytes, sizeof(bytes));
  return header;
}

void headers() {
  const auto real = encode_header(FrameType::leave, 0, 0, 0);
  std::uint32_t magic = 0;
  std::memcpy(&magic, real.data(), sizeof(magic));
  const auto refused = [](const std::string& header, const char* what) {
    peak = live.load();
    const std::size_t before = live;
    FrameReader reader;
    reader.feed(view(header));
    expect(Fault::protocol, [&] { (void)reader.next(); }, what);
    check(peak - before < 4096, "a length was believed before it was checked");
  };
  for (const FrameType type : types) {
    const auto number = static_cast<std::uint16_t>(type);
    const auto most = static_cast<std::uint32_t>(*limit(type));
    for (const std::uint32_t bytes : {most + 1, most + 4096, 0x7fffffffU, 0x80000000U, 0xffffffe7U, 0xffffffffU}) {
      refused(raw_header(magic, number, 0, bytes), "a giant length");
    }
    FrameReader reader;
    reader.feed(view(raw_header(magic, number, 0, most)));
    if (most > 0) check(!reader.next(), "the largest allowed length waits for its payload");
    expect(
        Fault::usage, [&] { (void)encode_header(type, 0, 0, std::size_t{most} + 1); },
        "a payload over the limit is not even encoded");
  }
  for (const std::uint16_t type : std::initializer_list<std::uint16_t>{0, 9, 10, 255, 256, 65535})
    refused(raw_header(magic, type, 0, 0), "no such type");
  refused(raw_header(magic, 5, 1, 0), "reserved bytes");
  refused(raw_header(magic + 1, 5, 0, 0), "another magic number");
  refused(raw_header(magic, 2, 0, 0), "a memory frame without its descriptor");
  refused(raw_header(magic, 6, 0, 0), "a record frame without its descriptor");

  FrameReader reader;
  expect(
      Fault::protocol,
      [&] {
        for (int i = 0; i < 100; ++i) reader.feed(Fd(check_errno(::open("/dev/null", O_RDONLY | O_CLOEXEC), "open")));
      },
      "descriptors that no frame carries");
}

// Hundreds of megabytes pass through a reader, which never holds more than a frame and one read.
void memory(Random& random) {
  peak = live.load();
  const std::size_t before = live;
  FrameReader reader;
  std::string stream;
  std::vector<Sent> sent;
  for (int i = 0; i < 20; ++i) append(stream, sent, random_frame(random, false));
  Sent largest;
  largest.type = FrameType::layout;
  largest.payload = bytes_of(random, *limit(FrameType::layout));
  append(stream, sent, std::move(largest));
  const std::size_t held = live - before;
  std::size_t passed = 0;
  std::size_t frames = 0;
  peak = live.load();
  for (int i = 0; i < 100; ++i) {
    std::string_view left = stream;
    while (!left.empty()) {
      const std::size_t piece = std::min(left.size(), 1 + random.below(std::size_t{1} << 16));
      reader.feed(view(left.substr(0, piece)));
      left.remove_prefix(piece);
      passed += piece;
      while (reader.next()) frames += 1;
    }
  }
  check_equal(frames, 100 * sent.size(), "frames of a long stream");
  check(peak - before - held < (std::size_t{5} << 20), "a reader holds " +
                                                           std::to_string((peak - before - held) >> 10) + " KB after " +
                                                           std::to_string(passed >> 20) + " MB");
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t seed = argument(count, values, 1, 1);
  const std::uint64_t rounds = argument(count, values, 2, 2000);
  Random random(seed);
  const std::size_t descriptors = open_descriptors();
  begin("headers");
  headers();
  begin("a long stream");
  memory(random);
  begin("streams", 45);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    valid(random);
    noise(random);
    mutated(random);
    mutated(random);
    causes(random);
  }
  check_equal(open_descriptors(), descriptors, "descriptors open at the end");
  std::printf("frame_test: seed %llu, %llu rounds of valid, random and mutated streams\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(rounds));
}
