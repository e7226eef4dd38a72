// Opens shared libraries at run time, and calls into them.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pypipe {

// Something that a machine may lack: the value, or the reason why it is missing. A missing library is not an error.
template <class T>
struct Found {
  std::optional<T> value;
  std::string reason;  // empty where there is a value

  [[nodiscard]] explicit operator bool() const noexcept { return value.has_value(); }
};

// Where to look for a library.
struct LibrarySearch {
  std::string override_path;            // set by the user; if not empty, nothing else is tried
  std::string name;                     // first the copy that this process has loaded, last the loader's own
  std::vector<std::string> candidates;  // files to try in between
};

// A loaded library. It stays loaded until the process ends: NCCL and the driver keep threads and exit
// handlers of their own, torch may use the same copy, and there is no way to tell when the last of their code has
// run. So this is a view that may be copied, and calls through it stay valid.
class Library {
 public:
  [[nodiscard]] static Found<Library> open(const LibrarySearch& search);

  // The copy of `name` (a soname) that this process has loaded already, for example as a dependency of torch.
  [[nodiscard]] static std::optional<Library> loaded(const std::string& name);

  // The file that was loaded.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  // The address of an exported symbol, or null.
  [[nodiscard]] void* find(const char* symbol) const noexcept;

 private:
  Library(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  static std::optional<Library> try_open(const std::string& name, int flags);

  void* handle_;
  std::string path_;
};

// Throws Error{system} if a function is missing that every supported release of the library has: then the library is
// broken, or a different one of the same name.
void check_complete(const Library& library, const std::vector<const char*>& missing);

// What a call returned, and the function's name for the message. Results are always checked.
template <class Result>
struct [[nodiscard]] Status {
  Result result;
  const char* function;
};

// One function of a library: callable where present, false where the library lacks it.
template <class Signature>
class Symbol;

template <class Result, class... Parameters>
class Symbol<Result(Parameters...)> {
 public:
  Symbol(const Library& library, const char* name) noexcept
      : name_(name), function_(reinterpret_cast<Result (*)(Parameters...)>(library.find(name))) {}

  [[nodiscard]] explicit operator bool() const noexcept { return function_ != nullptr; }
  [[nodiscard]] const char* name() const noexcept { return name_; }

  Status<Result> operator()(Parameters... parameters) const { return Status<Result>{function_(parameters...), name_}; }

 private:
  const char* name_;
  Result (*function_)(Parameters...);
};

}  // namespace pypipe
