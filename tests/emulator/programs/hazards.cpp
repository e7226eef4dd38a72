// hazards SCENARIO PLANTED|CORRECT SEEDS: runs the scenario as two ranks under seeds 1..SEEDS. Planted, the emulator
// must report the hazard under each of them; correct, nothing at all.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "pair.hpp"
#include "scenarios.hpp"

namespace pypipe::test {
namespace {

struct Tally {
  std::uint64_t expected = 0;
  std::uint64_t all = 0;
};

void judge(const Scenario& scenario, bool planted, std::uint64_t seed, const Tally& seen) {
  const std::string where = std::string(scenario.name) + ", seed " + std::to_string(seed);
  if (planted && seen.expected == 0) fail(where + ": the planted bug was not reported");
  if (!planted && seen.all != 0) fail(where + ": the correct twin was reported");
}

Tally count(const Scenario& scenario) {
  Tally tally;
  const std::string kinds = scenario.kinds;
  for (std::size_t begin = 0; begin < kinds.size();) {
    const std::size_t end = std::min(kinds.find('|', begin), kinds.size());
    tally.expected += hazards(kinds.substr(begin, end - begin).c_str());
    begin = end + 1;
  }
  tally.all = hazards();
  return tally;
}

int run(const Scenario& scenario, bool planted, std::uint64_t seeds) {
  std::uint64_t found = 0;
  run_pair([&](Rank& rank) {
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
      knob("seed", seed * 2 + static_cast<std::uint64_t>(rank.number));
      scenario.run(rank, planted);
      Tally mine = count(scenario);
      pypipe_emulator_reset_counters();
      if (rank.number == 1) {
        rank.put(&mine, sizeof mine);
      } else {
        Tally theirs;
        rank.get(&theirs, sizeof theirs);
        mine.expected += theirs.expected;
        mine.all += theirs.all;
        judge(scenario, planted, seed, mine);
        found += mine.expected;
      }
      rank.barrier();
    }
  });
  std::printf("%s %s: %llu seeds, %llu reports\n", scenario.name, planted ? "planted" : "correct",
              static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(found));
  return 0;
}

}  // namespace
}  // namespace pypipe::test

int main(int argc, char** argv) {
  using namespace pypipe::test;
  if (argc == 4) {
    for (const Scenario& scenario : scenarios()) {
      if (std::strcmp(scenario.name, argv[1]) != 0) continue;
      return run(scenario, std::strcmp(argv[2], "planted") == 0, std::strtoull(argv[3], nullptr, 10));
    }
  }
  std::fprintf(stderr, "usage: hazards SCENARIO planted|correct SEEDS\n");
  for (const Scenario& scenario : scenarios()) std::fprintf(stderr, "  %s\n", scenario.name);
  return 2;
}
