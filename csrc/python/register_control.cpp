#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "control/hub.hpp"
#include "control/recorder.hpp"
#include "link/slots.hpp"
#include "python/register.hpp"

namespace py = pybind11;
using py::arg;
using py::keep_alive;

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

// (stage, kind, microbatch, step, start, ready, end)
using DeedTuple =
    std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::vector<DeedTuple> tuples(const std::vector<Deed>& deeds) {
  std::vector<DeedTuple> all;
  all.reserve(deeds.size());
  for (const Deed& one : deeds) {
    all.emplace_back(one.stage, one.kind, one.microbatch, one.step, one.start, one.ready, one.end);
  }
  return all;
}

void register_recorder(py::module_& module) {
  py::class_<Recorder, std::shared_ptr<Recorder>>(module, "Recorder",
                                                  "A ring of what this rank did last; see csrc/control/recorder.hpp.")
      .def(py::init<int, std::uint32_t, const std::string&>(), arg("rank"), arg("capacity"), arg("path"))
      .def("step", &Recorder::step)
      .def(
          "begin",
          [](Recorder& recorder, std::uint64_t code) {
            recorder.begin(static_cast<std::uint32_t>(code >> 40), static_cast<std::uint32_t>(code >> 32) & 0xff,
                           static_cast<std::uint32_t>(code));
          },
          arg("code"),
          "stage << 40 | kind << 32 | microbatch; ends the action before it. CoreError once this step has failed.")
      .def("ready", &Recorder::ready)
      .def("end", &Recorder::end)
      .def("start_trace", &Recorder::start_trace, arg("capacity"))
      .def("stop_trace", [](Recorder& recorder) { return tuples(recorder.stop_trace()); })
      .def("deeds", [](const Recorder& recorder) { return tuples(recorder.deeds()); })
      .def("activity", [](const Recorder& recorder) { return to_json(recorder.activity()); })
      .def("set_busy", &Recorder::set_busy, arg("work"))
      .def("set_cause", &Recorder::set_cause, arg("cause"), arg("step") = 0)
      .def("discard", &Recorder::discard);
}

// What every rank says that it does, as JSON, and whether it was silent, so that its record had to say it.
std::vector<std::pair<std::string, bool>> ask(Hub& hub, std::size_t ranks, const Patience& patience) {
  std::vector<std::pair<std::string, bool>> all;
  for (const Hub::Answer& answer : hub.ask(ranks, patience)) all.emplace_back(to_json(answer.status), answer.silent);
  return all;
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

  register_recorder(module);

  py::class_<Hub>(module, "Hub", "The control sockets of one rank, and the thread that reads them.")
      .def(py::init<int>(), arg("rank"))
      .def_property_readonly("rank", &Hub::rank)
      .def(
          "add_peer", [](Hub& hub, int rank, int descriptor) { hub.add_peer(rank, Fd(descriptor)); }, arg("rank"),
          arg("descriptor"), "Takes over a connected, authenticated stream socket.")
      .def("start", &Hub::start, Released())
      .def("abort", &Hub::abort, arg("cause"), arg("step") = 0, Released(),
           "Fails everywhere; step: the one that failed, 0: unknown.")
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
      .def("leave", &Hub::leave, Released())
      .def("departed", &Hub::departed)
      .def("abandon", &Hub::abandon)
      .def("set_recorder", &Hub::set_recorder, arg("recorder"))
      .def("share_record", &Hub::share_record, arg("peer"), arg("patience"), Released())
      .def("ask", &ask, arg("ranks"), arg("patience"), Released())
      .def(
          "prolonging",
          [](Hub& hub, Patience patience, std::size_t ranks) {
            patience.prolong = [&hub, ranks, lately = patience.timeout] { return hub.somebody_is_busy(ranks, lately); };
            return patience;
          },
          arg("patience"), arg("ranks"), keep_alive<0, 1>(),
          "The same patience, prolonged for as long as a rank says that it is busy.")
      .def("send_envelope", &send_envelope, arg("peer"), arg("envelope"), arg("channel"), arg("patience"), Released())
      .def("take_envelope", &take_envelope, arg("peer"), arg("channel"), arg("patience"), Released());
}

}  // namespace pypipe::python
