// The parts of a program, of which its argument names the one to run.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace pypipe::test {

// What main() returns: 2 where no part has that name.
inline int choose(int argc, char** argv, const std::vector<std::pair<std::string, void (*)()>>& parts) {
  std::string names;
  for (const auto& [name, run] : parts) {
    if (argc == 2 && name == argv[1]) {
      run();
      return 0;
    }
    names += (names.empty() ? " " : "|") + name;
  }
  std::fprintf(stderr, "usage: %s%s\n", argv[0], names.c_str());
  return 2;
}

}  // namespace pypipe::test
