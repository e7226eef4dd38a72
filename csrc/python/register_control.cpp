#include <pybind11/stl.h>

#include <cstring>
#include <string_view>

#include "base/error.hpp"
#include "control/hub.hpp"
#include "link/slots.hpp"
#include "python/register.hpp"

namespace py = pybind11;
using py::arg;

namespace pypipe::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

void send_envelope(Hub& hub, int peer, Envelope envelope, std::uint32_t channel, const Patience& patience) {
  envelope.channel = channel;
  hub.send(peer, FrameType::envelope, channel, 0,
           std::string_view(reinterpret_cast<const char*>(&envelope), sizeof(envelope)), patience);
}

Envelope take_envelope(Hub& hub, int peer, std::uint32_t channel, const Patience& patience) {
  return envelope_of(hub.take(peer, FrameType::envelope, channel, patience));
}

}  // namespace

void register_control(py::module_& module) {
  py::class_<Envelope>(module, "Envelope", "The tag of a message, and how much of the batch it is.")
      .def(py::init([](std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch, std::uint32_t layout,
                       std::uint64_t bytes, std::uint64_t rows, std::uint64_t batch_rows) {
             return Envelope{0, stage, kind, microbatch, layout, 0, bytes, rows, batch_rows};
           }),
           arg("stage"), arg("kind"), arg("microbatch"), arg("layout"), arg("bytes"), arg("rows"), arg("batch_rows"))
      .def_readonly("stage", &Envelope::stage)
      .def_readonly("kind", &Envelope::kind)
      .def_readonly("microbatch", &Envelope::microbatch)
      .def_readonly("layout", &Envelope::layout)
      .def_readonly("bytes", &Envelope::bytes)
      .def_readonly("rows", &Envelope::rows)
      .def_readonly("batch_rows", &Envelope::batch_rows);

  py::class_<Hub>(module, "Hub", "The control sockets of one rank, and the thread that reads them.")
      .def(py::init<int>(), arg("rank"))
      .def_property_readonly("rank", &Hub::rank)
      .def(
          "add_peer", [](Hub& hub, int rank, int descriptor) { hub.add_peer(rank, Fd(descriptor)); }, arg("rank"),
          arg("descriptor"), "Takes over a connected, authenticated stream socket.")
      .def("start", &Hub::start, Released())
      .def("abort", &Hub::abort, arg("cause"), Released())
      .def("cause",
           [](const Hub& hub) -> std::optional<py::str> {
             const std::optional<std::string> cause = [&] {
               const py::gil_scoped_release released;
               return hub.cause();
             }();
             if (!cause) return std::nullopt;
             // A peer wrote it: it need not be UTF-8.
             return py::reinterpret_steal<py::str>(
                 PyUnicode_DecodeUTF8(cause->data(), static_cast<py::ssize_t>(cause->size()), "replace"));
           })
      .def("check", &Hub::check, arg("peer"), Released())
      .def("close", &Hub::close, Released())
      .def("abandon", &Hub::abandon)
      .def("send_envelope", &send_envelope, arg("peer"), arg("envelope"), arg("channel"), arg("patience"), Released())
      .def("take_envelope", &take_envelope, arg("peer"), arg("channel"), arg("patience"), Released());
}

}  // namespace pypipe::python
