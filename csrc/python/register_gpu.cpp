#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/library.hpp"
#include "link/nccl/cuda_api.hpp"
#include "link/nccl/cuda_gpu.hpp"
#include "link/nccl/nccl_api.hpp"
#include "link/nccl/nccl_link.hpp"
#include "link/nccl/nccl_watchdog.hpp"
#include "python/register.hpp"

namespace py = pybind11;
using py::arg;

namespace pypipe::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

// Holders cannot be const, but all methods of these classes are.
using CudaApi = std::shared_ptr<cuda::Api>;
using NcclApi = std::shared_ptr<nccl::Api>;
using CudaGpu = std::shared_ptr<cuda::Gpu>;

// Without the GIL: the destructors wait for threads.
template <class Object>
struct DeleteReleased {
  void operator()(Object* last) const {
    std::optional<py::gil_scoped_release> released;
    if (PyGILState_Check() == 1) released.emplace();
    delete last;
  }
};

template <class Api>
std::pair<std::optional<std::shared_ptr<Api>>, std::string> as_pair(Found<std::shared_ptr<const Api>> found) {
  if (!found.value) return {std::nullopt, std::move(found.reason)};
  return {std::const_pointer_cast<Api>(*std::move(found.value)), {}};
}

// Calls a Python function for device memory. The tensor it returns is held for as long as the memory is used.
using AllocateFunction = py::typing::Callable<py::object(std::size_t)>;

Allocate as_allocate(const AllocateFunction& function) {
  const auto held = std::shared_ptr<py::function>(new py::function(function), [](py::function* last) {
    const py::gil_scoped_acquire gil;
    delete last;
  });
  return [held](std::size_t bytes) {
    const py::gil_scoped_acquire gil;
    auto* const tensor = new py::object((*held)(bytes));
    const auto address = tensor->attr("data_ptr")().cast<std::uintptr_t>();
    return std::shared_ptr<void>(reinterpret_cast<void*>(address),  // NOLINT(performance-no-int-to-ptr)
                                 [tensor](void*) {
                                   const py::gil_scoped_acquire again;
                                   delete tensor;
                                 });
  };
}

std::shared_ptr<NcclEdge> add_edge(NcclEdges& edges, const py::bytes& id, int rank, NcclEdge::Direction direction,
                                   const std::string& name, int ctas) {
  nccl::UniqueId unique{};
  const std::string_view text = id;
  if (text.size() != sizeof(unique.internal)) throw Error(Fault::usage, "an NCCL unique id has 128 bytes");
  std::memcpy(unique.internal, text.data(), text.size());
  return edges.add(unique, rank, direction, name, ctas);
}

void register_nccl_links(py::module_& module) {
  py::enum_<NcclEdge::Direction>(module, "NcclDirection", "Which way messages of an edge go.")
      .value("ONE_WAY", NcclEdge::Direction::one_way)
      .value("BOTH_WAYS", NcclEdge::Direction::both_ways)
      .value("TO_ITSELF", NcclEdge::Direction::to_itself);
  py::class_<NcclEdge, std::shared_ptr<NcclEdge>>(module, "NcclEdge", "One end of a communicator of two ranks.");
  py::class_<NcclEdges, std::shared_ptr<NcclEdges>>(module, "NcclEdges",
                                                    "All communicators of a rank; see csrc/link/nccl/nccl_edges.hpp.")
      .def(py::init([](const CudaGpu& gpu, const NcclApi& nccl) {
             return std::shared_ptr<NcclEdges>(new NcclEdges(gpu, nccl), DeleteReleased<NcclEdges>());
           }),
           arg("gpu"), arg("nccl"))
      .def("add", &add_edge, arg("unique_id"), arg("rank"), arg("direction"), arg("name"), arg("ctas"),
           "A communicator, to be made by connect().")
      .def("connect", &NcclEdges::connect, arg("policy"), Released(),
           "Makes all communicators and connects them; returns when the other ends have done so too.");
  py::class_<NcclGroup, std::shared_ptr<NcclGroup>>(module, "NcclGroup",
                                                    "Transfers held back; see csrc/link/nccl/nccl_group.hpp.")
      .def(py::init<>())
      .def("issue", &NcclGroup::issue, arg("policy"), Released());
  py::class_<NcclSendLink, SendLink>(module, "NcclSendLink")
      .def(py::init([](Hub& hub, int peer, std::uint32_t link, std::shared_ptr<NcclEdge> edge,
                       const AllocateFunction& allocate, std::optional<std::shared_ptr<NcclGroup>> group) {
             return std::make_unique<NcclSendLink>(hub, peer, link, std::move(edge), as_allocate(allocate),
                                                   std::move(group).value_or(nullptr));
           }),
           arg("hub"), arg("peer"), arg("link"), arg("edge"), arg("allocate"), arg("group"), py::keep_alive<1, 2>());
  py::class_<NcclReceiveLink, ReceiveLink>(module, "NcclReceiveLink")
      .def(py::init([](Hub& hub, int peer, std::uint32_t link, std::shared_ptr<NcclEdge> edge,
                       const AllocateFunction& allocate,
                       const std::vector<std::pair<std::uint32_t, std::uint32_t>>& slots,
                       std::optional<std::shared_ptr<NcclGroup>> group) {
             return std::make_unique<NcclReceiveLink>(hub, peer, link, std::move(edge), as_allocate(allocate),
                                                      std::map(slots.begin(), slots.end()),
                                                      std::move(group).value_or(nullptr));
           }),
           arg("hub"), arg("peer"), arg("link"), arg("edge"), arg("allocate"), arg("slots"), arg("group"),
           py::keep_alive<1, 2>());
  py::class_<NcclWatchdog, std::unique_ptr<NcclWatchdog, DeleteReleased<NcclWatchdog>>>(
      module, "NcclWatchdog", "Looks after communicators; see csrc/link/nccl/nccl_watchdog.hpp.")
      .def(py::init([](Hub& hub, std::shared_ptr<NcclEdges> edges, double limit, std::size_t ranks) {
             const auto nanoseconds =
                 std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(limit));
             return std::unique_ptr<NcclWatchdog, DeleteReleased<NcclWatchdog>>(
                 new NcclWatchdog(hub, std::move(edges), nanoseconds, ranks));
           }),
           arg("hub"), arg("edges"), arg("limit"), arg("ranks"), py::keep_alive<1, 2>(), Released())
      .def("close", &NcclWatchdog::close, arg("policy"), Released());
}

}  // namespace

void register_gpu(py::module_& module) {
  module.def(
      "loaded_library",
      [](const std::string& name) -> std::optional<std::string> {
        const std::optional<Library> library = Library::loaded(name);
        return library ? std::optional<std::string>(library->path()) : std::nullopt;
      },
      arg("name"), "The file of a library (by its soname) that this process has loaded, or None.");

  py::class_<cuda::Api, CudaApi>(module, "CudaLibrary", "The CUDA driver.")
      .def_property_readonly("path", &cuda::Api::path)
      .def_property_readonly("version", &cuda::Api::version)
      .def("device_names", &cuda::Api::device_names, Released(),
           "The GPUs that this process may use. Initializes the driver. Raises CoreError without any.");
  py::class_<cuda::Gpu, CudaGpu>(module, "CudaGpu", "A GPU and its primary context.")
      .def(py::init([](const CudaApi& api, int ordinal) { return std::make_shared<cuda::Gpu>(api, ordinal); }),
           arg("cuda"), arg("ordinal"), Released())
      .def_property_readonly("multiprocessors", &cuda::Gpu::multiprocessors);
  module.def(
      "open_cuda", [](const std::string& override_path) { return as_pair(cuda::Api::load(override_path)); },
      arg("override_path"), Released(),
      "The driver, or None and the reason. Raises CoreError for a library that is something else.");

  py::class_<nccl::Api, NcclApi>(module, "NcclLibrary", "One copy of NCCL.")
      .def_property_readonly("path", &nccl::Api::path)
      .def_property_readonly("version", &nccl::Api::version)
      .def("unique_id",
           [](const nccl::Api& api) {
             const nccl::UniqueId id = [&] {
               const py::gil_scoped_release released;
               return nccl::make_unique_id(api);
             }();
             return py::bytes(id.internal, sizeof(id.internal));
           })
      .def(
          "try_communicator",
          [](const NcclApi& api, const std::optional<CudaGpu>& gpu, const WaitPolicy& policy) {
            nccl::try_communicator(api, gpu.value_or(nullptr), policy);
          },
          arg("gpu"), arg("policy"), Released(),
          "Makes a communicator of one rank and takes it down. Raises CoreError with what NCCL says.");
  module.def(
      "open_nccl",
      [](const std::string& override_path, const std::vector<std::string>& candidates) {
        return as_pair(nccl::Api::load(override_path, candidates));
      },
      arg("override_path"), arg("candidates"), Released(),
      "NCCL, or None and the reason. Raises CoreError for a library that is something else or too old.");
  register_nccl_links(module);
}

}  // namespace pypipe::python
