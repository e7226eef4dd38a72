#include "report.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "access.hpp"
#include "engine.hpp"

namespace pypipe::emulator {
namespace {

std::string hexadecimal(std::uintptr_t value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string demangled(const char* symbol) {
  int problem = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(symbol, nullptr, nullptr, &problem), std::free);
  return problem == 0 && text ? text.get() : symbol;
}

// One write(2) each, so that the reports of several processes don't mix.
void print(const std::string& line) {
  (void)!::write(STDERR_FILENO, line.data(), line.size());
  const std::string& path = engine().knobs.report;
  if (path.empty()) return;
  const int file = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) return;
  (void)!::write(file, line.data(), line.size());
  ::close(file);
}

std::string heading() { return "pypipe emulator [" + std::to_string(::getpid()) + "]: "; }

}  // namespace

std::string describe(const Site& site) {
  std::string text = site.function;
  if (site.label != nullptr) text += std::string(" in ") + site.label;
  Dl_info about{};
  if (site.caller != nullptr && ::dladdr(site.caller, &about) != 0) {
    text += ", called from ";
    if (about.dli_sname != nullptr) text += demangled(about.dli_sname) + " of ";
    const std::string file = about.dli_fname != nullptr ? about.dli_fname : "?";
    text +=
        file.substr(file.rfind('/') + 1) + "+" +
        hexadecimal(reinterpret_cast<std::uintptr_t>(site.caller) - reinterpret_cast<std::uintptr_t>(about.dli_fbase));
  }
  return text;
}

std::string describe(const Access& access) {
  return std::string(access.write ? "write" : "read") + " by " + access.name + " #" + std::to_string(access.sequence) +
         " on " + access.where + ", bytes " + hexadecimal(access.range.begin) + ".." + hexadecimal(access.range.end) +
         " (" + std::to_string(access.range.end - access.range.begin) + "), issued by " + describe(access.site);
}

void Reports::hazard(const std::string& kind, const std::string& text) {
  last_ = kind + ": " + text;
  constexpr std::uint64_t printed = 20;
  const std::uint64_t number = ++counts_[kind];
  if (number <= printed) print(heading() + last_ + "\n");
  if (number == printed) print(heading() + kind + ": further ones are only counted\n");
  if (engine().knobs.exit_on_hazard) std::_Exit(97);
}

void Reports::note(const std::string& text) { print(heading() + text + "\n"); }

std::uint64_t Reports::count(const char* kind) const {
  if (kind != nullptr) {
    const auto at = counts_.find(kind);
    return at == counts_.end() ? 0 : at->second;
  }
  std::uint64_t all = 0;
  for (const auto& [name, number] : counts_) all += number;
  return all;
}

}  // namespace pypipe::emulator
