#include "checker.hpp"

#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace pypipe::emulator {
namespace {

constexpr std::size_t most_nodes = 1U << 18U;

void report(const Access& one, const Access& other) {
  engine().reports.hazard("race", describe(one) + "\n    is not ordered with the " + describe(other));
}

}  // namespace

void Checker::access(const Access& access, const Clock& clock) {
  const Range range = access.range;
  if (range.empty()) return;
  split(range.begin);
  split(range.end);
  std::vector<const Access*> raced;
  const auto judge = [&](const Known& known) {
    if (!known || (known->host && access.host) || clock.covers(known->epoch)) return;
    if (std::find(raced.begin(), raced.end(), known.get()) != raced.end()) return;
    raced.push_back(known.get());
    report(*known, access);
  };
  const auto first = nodes_.lower_bound(range.begin);
  const auto last = nodes_.lower_bound(range.end);
  const auto known = std::make_shared<const Access>(access);
  for (auto at = first; at != last; ++at) {
    judge(at->second.write);
    if (access.write) {
      for (const Known& read : at->second.reads) judge(read);
    }
  }
  if (access.write) {
    nodes_.erase(first, last);
    nodes_[range.begin] = Node{range.end, known, {}};
  } else {
    std::uintptr_t done = range.begin;
    for (auto at = first; at != last; ++at) {
      if (done < at->first) nodes_.emplace_hint(at, done, Node{at->first, nullptr, {known}});
      // A later write that is ordered after this read is ordered after the reads before it.
      std::erase_if(at->second.reads, [&](const Known& read) { return clock.covers(read->epoch); });
      at->second.reads.push_back(known);
      done = at->second.end;
    }
    if (done < range.end) nodes_[done] = Node{range.end, nullptr, {known}};
  }
  if (nodes_.size() > forget_at_) forget();
}

void Checker::together(const std::vector<Access>& accesses) {
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!accesses[i].range.overlaps(accesses[j].range)) continue;
      if (accesses[i].write || accesses[j].write) report(accesses[j], accesses[i]);
    }
  }
}

// Makes `at` a boundary between nodes.
void Checker::split(std::uintptr_t at) {
  auto node = nodes_.upper_bound(at);
  if (node == nodes_.begin()) return;
  --node;
  if (node->first == at || node->second.end <= at) return;
  Node right = node->second;
  node->second.end = at;
  nodes_.emplace(at, std::move(right));
}

// Drops what every future access is ordered after.
void Checker::forget() {
  const std::vector<const Clock*> clocks = engine().horizon();
  const auto settled = [&](const Known& known) {
    return !known ||
           std::all_of(clocks.begin(), clocks.end(), [&](const Clock* clock) { return clock->covers(known->epoch); });
  };
  std::erase_if(nodes_, [&](const auto& node) {
    return settled(node.second.write) && std::all_of(node.second.reads.begin(), node.second.reads.end(), settled);
  });
  // Memory stays bounded whatever happens: then the lowest addresses are forgotten too early.
  while (nodes_.size() > most_nodes) nodes_.erase(nodes_.begin());
  forget_at_ = std::max<std::size_t>(4096, 2 * nodes_.size());
}

}  // namespace pypipe::emulator
