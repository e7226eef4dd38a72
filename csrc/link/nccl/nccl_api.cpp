#include "link/nccl/nccl_api.hpp"

#include <algorithm>
#include <optional>

#include "base/bounded_call.hpp"
#include "base/error.hpp"

namespace pypipe::nccl {
namespace {

const char* name(Result result) noexcept {
  switch (result) {
    case Result::success:
      return "ncclSuccess";
    case Result::unhandled_cuda_error:
      return "ncclUnhandledCudaError";
    case Result::system_error:
      return "ncclSystemError";
    case Result::internal_error:
      return "ncclInternalError";
    case Result::invalid_argument:
      return "ncclInvalidArgument";
    case Result::invalid_usage:
      return "ncclInvalidUsage";
    case Result::remote_error:
      return "ncclRemoteError";
    case Result::in_progress:
      return "ncclInProgress";
    case Result::timeout:
      return "ncclTimeout";
  }
  return "an error newer than pypipe";
}

}  // namespace

Found<std::shared_ptr<const Api>> Api::load(const std::string& override_path,
                                            const std::vector<std::string>& candidates) {
  const Found<Library> library = Library::open(LibrarySearch{override_path, "libnccl.so.2", candidates});
  if (!library.value) return {std::nullopt, library.reason};
  return {std::shared_ptr<const Api>(new Api(*library.value)), {}};
}

#define PYPIPE_INITIALIZE(member, symbol, parameters) member(library, #symbol),
Api::Api(const Library& library)
    : PYPIPE_NCCL_SYMBOLS(PYPIPE_INITIALIZE) PYPIPE_NCCL_TEXT_SYMBOLS(PYPIPE_INITIALIZE) library_(library) {
#undef PYPIPE_INITIALIZE
  std::vector<const char*> missing;
#define PYPIPE_COLLECT(member, symbol, parameters) \
  if (!(member)) missing.push_back(#symbol);
  PYPIPE_NCCL_SYMBOLS(PYPIPE_COLLECT)
  PYPIPE_NCCL_TEXT_SYMBOLS(PYPIPE_COLLECT)
#undef PYPIPE_COLLECT
  check_complete(library, missing);
  check(get_version(&version_));
  if (version_ < oldest_version) {
    throw Error(Fault::system, library.path() + " is NCCL " + version_text(version_) + ", and pypipe needs " +
                                   version_text(oldest_version) + " or later");
  }
}

std::string Api::describe(Result result) const {
  const char* text = get_error_string(result).result;
  return std::string(name(result)) + " (" + std::to_string(static_cast<int>(result)) +
         "): " + (text != nullptr ? text : "no text");
}

void Api::fail(const Status& status) const {
  std::string message = std::string(status.function) + " failed: " + describe(status.result);
  // The last warning of any communicator in this process: NCCL ignores the argument.
  const char* words = get_last_error(nullptr).result;
  if (words != nullptr && *words != '\0') message += std::string("; NCCL's last words: ") + words;
  throw Error(Fault::system, message);
}

std::string version_text(int version) {
  // Up to 2.8 the number had one digit fewer.
  const int minors = version < 10000 ? 10 : 100;
  return std::to_string(version / (minors * 100)) + "." + std::to_string(version / 100 % minors) + "." +
         std::to_string(version % 100);
}

Config make_config(int version, const CommunicatorOptions& options) noexcept {
  Config config;
  config.version = static_cast<unsigned>(std::min(version, config_version));
  config.blocking = 1;
  config.split_share = 0;
  config.min_ctas = options.min_ctas;
  config.max_ctas = options.max_ctas;
  config.comm_name = options.name;
  return config;
}

UniqueId make_unique_id(const Api& api) {
  UniqueId id{};
  api.check(api.get_unique_id(&id));
  return id;
}

void try_communicator(const std::shared_ptr<const Api>& api, const cuda::GpuPointer& gpu, const WaitPolicy& policy) {
  BoundedCall call([api, gpu] {
    std::optional<cuda::Current> current;
    if (gpu) current.emplace(*gpu);
    Config config = make_config(api->version(), CommunicatorOptions{1, 1, "pypipe try"});
    CommunicatorHandle communicator = nullptr;
    api->check(api->comm_init_rank_config(&communicator, 1, make_unique_id(*api), 0, &config));
    api->check(api->comm_destroy(communicator));
  });
  call.wait(policy, "making a communicator of one rank");
}

}  // namespace pypipe::nccl
