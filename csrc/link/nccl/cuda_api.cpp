#include "link/nccl/cuda_api.hpp"

#include <array>

#include "base/error.hpp"

namespace pypipe::cuda {

Found<std::shared_ptr<const Api>> Api::load(const std::string& override_path) {
  const Found<Library> library = Library::open(LibrarySearch{override_path, "libcuda.so.1", {}});
  if (!library.value) return {std::nullopt, library.reason};
  return {std::shared_ptr<const Api>(new Api(*library.value)), {}};
}

#define PYPIPE_INITIALIZE(member, symbol, parameters) member(library, #symbol),
Api::Api(const Library& library) : PYPIPE_CUDA_SYMBOLS(PYPIPE_INITIALIZE) library_(library) {
#undef PYPIPE_INITIALIZE
  std::vector<const char*> missing;
#define PYPIPE_COLLECT(member, symbol, parameters) \
  if (!(member)) missing.push_back(#symbol);
  PYPIPE_CUDA_SYMBOLS(PYPIPE_COLLECT)
#undef PYPIPE_COLLECT
  check_complete(library, missing);
}

std::string Api::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  const bool known = succeeded(get_error_name(result, &name)) && succeeded(get_error_string(result, &text)) &&
                     name != nullptr && text != nullptr;
  const std::string number = " (" + std::to_string(static_cast<int>(result)) + ")";
  return known ? name + number + ": " + text : "an error that the driver does not know" + number;
}

void Api::fail(const Status& status) const {
  throw Error(Fault::system, std::string(status.function) + " failed: " + describe(status.result));
}

int Api::version() const {
  int number = 0;
  check(driver_get_version(&number));
  return number;
}

std::vector<std::string> Api::device_names() const {
  check(init(0));
  int count = 0;
  check(device_get_count(&count));
  std::vector<std::string> names;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device device = 0;
    std::array<char, 256> name{};
    check(device_get(&device, ordinal));
    check(device_get_name(name.data(), static_cast<int>(name.size()) - 1, device));
    names.emplace_back(name.data());
  }
  return names;
}

}  // namespace pypipe::cuda
