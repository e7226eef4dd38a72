#include "base/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>

#include "base/error.hpp"

namespace pypipe {
namespace {

// RTLD_LOCAL: a library's symbols must not replace those of another copy that is loaded elsewhere.
constexpr int how = RTLD_NOW | RTLD_LOCAL;

std::string last_error(const std::string& name) {
  const char* text = ::dlerror();
  const std::string reason = text != nullptr ? text : "the loader gave no reason";
  return reason.find(name) == std::string::npos ? name + ": " + reason : reason;
}

}  // namespace

std::optional<Library> Library::try_open(const std::string& name, int flags) {
  void* handle = ::dlopen(name.c_str(), flags);
  if (handle == nullptr) return std::nullopt;
  const link_map* map = nullptr;
  const bool known = ::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr &&
                     map->l_name != nullptr && *map->l_name != '\0';
  return Library(handle, known ? map->l_name : name);
}

std::optional<Library> Library::loaded(const std::string& name) {
  std::optional<Library> library = try_open(name, how | RTLD_NOLOAD);
  if (!library) static_cast<void>(::dlerror());  // it is kept for the next caller otherwise
  return library;
}

Found<Library> Library::open(const LibrarySearch& search) {
  if (!search.override_path.empty()) {
    std::optional<Library> library = try_open(search.override_path, how);
    if (library) return {std::move(library), {}};
    return {std::nullopt, last_error(search.override_path)};
  }
  if (std::optional<Library> library = loaded(search.name)) return {std::move(library), {}};
  std::string reasons;
  std::vector<std::string> names = search.candidates;
  names.push_back(search.name);
  for (const std::string& name : names) {
    std::optional<Library> library = try_open(name, how);
    if (library) return {std::move(library), {}};
    if (!reasons.empty()) reasons += "; ";
    reasons += last_error(name);
  }
  return {std::nullopt, reasons};
}

void* Library::find(const char* symbol) const noexcept { return ::dlsym(handle_, symbol); }

void check_complete(const Library& library, const std::vector<const char*>& missing) {
  if (missing.empty()) return;
  constexpr std::size_t most = 3;
  std::string message = library.path() + " lacks";
  for (std::size_t i = 0; i < std::min(most, missing.size()); ++i) {
    message += i == 0 ? " " : ", ";
    message += missing[i];
  }
  if (missing.size() > most) message += " and " + std::to_string(missing.size() - most) + " more";
  throw Error(Fault::system, message);
}

}  // namespace pypipe
