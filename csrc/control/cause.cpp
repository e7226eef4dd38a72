#include "control/cause.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "control/frame.hpp"

namespace pypipe {
namespace {

constexpr std::size_t text_count = 5;

// The member and its limit in bytes. What Python sends of a message and a traceback, it cuts to fewer characters.
using Text = std::pair<std::string Cause::*, std::size_t>;
constexpr std::array<Text, text_count> cause_texts{
    Text{&Cause::call_name, 64}, Text{&Cause::doing, 1024}, Text{&Cause::type, 1024},
    Text{&Cause::message, std::size_t{64} << 10}, Text{&Cause::traceback, std::size_t{64} << 10}};

struct CauseHeader {
  std::uint32_t kind;
  std::int32_t rank;
  std::int32_t seen_by;
  std::int32_t stage;
  std::int32_t action_kind;
  std::int32_t microbatch;
  std::uint64_t call;
  std::uint64_t limit;
  std::uint32_t trains;
  std::uint32_t ranks;
  std::array<std::uint32_t, text_count> lengths;
  std::uint32_t reports;
};
static_assert(sizeof(CauseHeader) == 72);

[[noreturn]] void refuse_cause() { throw Error(Fault::protocol, "bytes that are not a valid cause of a failure"); }

}  // namespace

std::string Cause::encode() const {
  CauseHeader header{static_cast<std::uint32_t>(kind),
                     rank,
                     seen_by,
                     stage,
                     action_kind,
                     microbatch,
                     call,
                     limit,
                     trains ? 1U : 0U,
                     ranks,
                     {},
                     0};
  std::array<std::string_view, text_count> clipped;
  std::size_t size = sizeof(header);
  for (std::size_t i = 0; i < text_count; ++i) {
    const auto& [member, most] = cause_texts[i];
    clipped[i] = clip(this->*member, most);
    header.lengths[i] = static_cast<std::uint32_t>(clipped[i].size());
    size += clipped[i].size();
  }
  header.reports = static_cast<std::uint32_t>(std::min(reports.size(), (abort_limit - size) / sizeof(RankReport)));
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  for (const std::string_view text : clipped) bytes += text;
  bytes.append(reinterpret_cast<const char*>(reports.data()), header.reports * sizeof(RankReport));
  return bytes;
}

Cause Cause::decode(std::string_view bytes) {
  CauseHeader header{};
  if (bytes.size() < sizeof(header) || bytes.size() > abort_limit) refuse_cause();
  std::memcpy(&header, bytes.data(), sizeof(header));
  bytes.remove_prefix(sizeof(header));
  if (header.kind > static_cast<std::uint32_t>(CauseKind::overdue)) refuse_cause();
  Cause cause;
  cause.kind = static_cast<CauseKind>(header.kind);
  cause.rank = header.rank;
  cause.seen_by = header.seen_by;
  cause.stage = header.stage;
  cause.action_kind = header.action_kind;
  cause.microbatch = header.microbatch;
  cause.call = header.call;
  cause.trains = header.trains != 0;
  cause.ranks = header.ranks;
  cause.limit = header.limit;
  for (std::size_t i = 0; i < text_count; ++i) {
    const auto& [member, most] = cause_texts[i];
    if (header.lengths[i] > most || header.lengths[i] > bytes.size()) refuse_cause();
    cause.*member = bytes.substr(0, header.lengths[i]);
    bytes.remove_prefix(header.lengths[i]);
  }
  if (bytes.size() != std::size_t{header.reports} * sizeof(RankReport)) refuse_cause();
  cause.reports.resize(header.reports);
  if (!bytes.empty()) std::memcpy(cause.reports.data(), bytes.data(), bytes.size());
  for (RankReport& report : cause.reports) report.status.work.back() = '\0';
  return cause;
}

}  // namespace pypipe
