#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "control/action_log.hpp"
#include "control/cause.hpp"
#include "control/hub.hpp"
#include "link/slots.hpp"
#include "python/register.hpp"

namespace py = pybind11;
using py::arg;
using py::keep_alive;

namespace pypipe::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

void send_envelope(Hub& hub, int peer, Envelope envelope, std::uint32_t channel, const WaitPolicy& policy) {
  envelope.channel = channel;
  hub.send(peer, FrameType::envelope, channel, 0,
           std::string_view(reinterpret_cast<const char*>(&envelope), sizeof(envelope)), policy);
}

Envelope take_envelope(Hub& hub, int peer, std::uint32_t channel, const WaitPolicy& policy) {
  return envelope_of(hub.take(peer, FrameType::envelope, channel, policy));
}

// Text of a peer or a record, which may not be UTF-8.
py::str text(std::string_view bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "replace"));
}

// Python's text as UTF-8. A lone surrogate, as in some file names, is written out.
std::string utf8(const py::str& text) {
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

constexpr double nanosecond = 1e-9;

std::optional<std::int32_t> known(std::int32_t value) {
  return value == Cause::unknown ? std::nullopt : std::optional(value);
}

void register_status(py::module_& module) {
  py::class_<ActionEntry>(module, "ActionEntry", "One action of a rank, and when it was done; see rank_status.hpp.")
      .def(py::init<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t,
                    std::uint64_t>(),
           arg("stage"), arg("kind"), arg("microbatch"), arg("step"), arg("start"), arg("ready") = 0, arg("end") = 0)
      .def_readonly("stage", &ActionEntry::stage)
      .def_readonly("kind", &ActionEntry::kind)
      .def_readonly("microbatch", &ActionEntry::microbatch)
      .def_readonly("step", &ActionEntry::step)
      .def_readonly("start", &ActionEntry::start)
      .def_readonly("ready", &ActionEntry::ready)
      .def_readonly("end", &ActionEntry::end);
  py::class_<RankStatus>(module, "RankStatus", "What a rank is doing; its actions' times are nanoseconds ago.")
      .def(py::init([](std::uint32_t rank, std::uint32_t step, std::optional<ActionEntry> now,
                       std::optional<ActionEntry> last, const std::string& busy, double busy_for) {
             RankStatus status;
             status.rank = rank;
             status.step = step;
             status.running = now ? 1 : 0;
             status.completed = last ? 1 : 0;
             status.now = now.value_or(ActionEntry{});
             status.last = last.value_or(ActionEntry{});
             if (!busy.empty()) status.busy = static_cast<std::uint64_t>(busy_for / nanosecond);
             clip(busy, status.work.size() - 1).copy(status.work.data(), status.work.size() - 1);
             return status;
           }),
           arg("rank"), arg("step"), arg("now") = py::none(), arg("last") = py::none(), arg("busy") = "",
           arg("busy_for") = 0.0)
      .def_readonly("rank", &RankStatus::rank)
      .def_readonly("step", &RankStatus::step)
      .def_property_readonly(
          "now",
          [](const RankStatus& status) { return status.running != 0 ? std::optional(status.now) : std::nullopt; },
          "The action in progress.")
      .def_property_readonly(
          "last",
          [](const RankStatus& status) { return status.completed != 0 ? std::optional(status.last) : std::nullopt; },
          "The action completed last.")
      .def_property_readonly(
          "busy",
          [](const RankStatus& status) {
            return status.busy != 0 ? std::optional(text(status.work.data())) : std::nullopt;
          },
          "What it says that it is busy with.")
      .def_property_readonly(
          "busy_for", [](const RankStatus& status) { return static_cast<double>(status.busy) * nanosecond; },
          "Seconds.");
  py::class_<RankReport>(module, "RankReport",
                         "A status, and whether its rank was silent, so that this is what its record says.")
      .def(py::init([](const RankStatus& status, bool silent) { return RankReport{status, silent ? 1U : 0U, 0}; }),
           arg("status"), arg("silent") = false)
      .def_readonly("status", &RankReport::status)
      .def_property_readonly("silent", [](const RankReport& report) { return report.silent != 0; });
}

void register_cause(py::module_& module) {
  py::enum_<CauseKind>(module, "CauseKind", "Why a pipeline failed; see csrc/control/cause.hpp.")
      .value("ERROR", CauseKind::error)
      .value("INTERRUPT", CauseKind::interrupt)
      .value("TIMEOUT", CauseKind::timeout)
      .value("LEFT", CauseKind::left)
      .value("LOST", CauseKind::lost)
      .value("LINK", CauseKind::link)
      .value("OVERDUE", CauseKind::overdue);
  py::class_<Cause>(module, "Cause", "The first cause of a pipeline's failure; see csrc/control/cause.hpp.")
      .def(
          py::init([](CauseKind kind, std::int32_t rank, std::optional<std::int32_t> seen_by,
                      std::optional<std::int32_t> stage, std::optional<std::int32_t> action_kind,
                      std::optional<std::int32_t> microbatch, std::uint64_t call, const py::str& call_name, bool trains,
                      const py::str& doing, const py::str& type, const py::str& message, const py::str& traceback,
                      std::uint32_t ranks, double limit, const std::vector<RankReport>& reports) {
            return Cause{kind,
                         rank,
                         seen_by.value_or(Cause::unknown),
                         stage.value_or(Cause::unknown),
                         action_kind.value_or(Cause::unknown),
                         microbatch.value_or(Cause::unknown),
                         call,
                         trains,
                         ranks,
                         static_cast<std::uint64_t>(limit / nanosecond),
                         utf8(call_name),
                         utf8(doing),
                         utf8(type),
                         utf8(message),
                         utf8(traceback),
                         reports};
          }),
          arg("kind"), arg("rank"), py::kw_only(), arg("seen_by") = py::none(), arg("stage") = py::none(),
          arg("action_kind") = py::none(), arg("microbatch") = py::none(), arg("call") = 0, arg("call_name") = "",
          arg("trains") = false, arg("doing") = "", arg("type") = "", arg("message") = "", arg("traceback") = "",
          arg("ranks") = 0, arg("limit") = 0.0, arg("reports") = std::vector<RankReport>{})
      .def_readonly("kind", &Cause::kind)
      .def_readonly("rank", &Cause::rank)
      .def_property_readonly("seen_by", [](const Cause& cause) { return known(cause.seen_by); })
      .def_property_readonly("stage", [](const Cause& cause) { return known(cause.stage); })
      .def_property_readonly("action_kind", [](const Cause& cause) { return known(cause.action_kind); })
      .def_property_readonly("microbatch", [](const Cause& cause) { return known(cause.microbatch); })
      .def_readonly("call", &Cause::call, "The number of the call of step() or eval(); 0: in none.")
      .def_property_readonly("call_name", [](const Cause& cause) { return text(cause.call_name); })
      .def_readonly("trains", &Cause::trains)
      .def_property_readonly("doing", [](const Cause& cause) { return text(cause.doing); })
      .def_property_readonly("type", [](const Cause& cause) { return text(cause.type); })
      .def_property_readonly("message", [](const Cause& cause) { return text(cause.message); })
      .def_property_readonly("traceback", [](const Cause& cause) { return text(cause.traceback); })
      .def_readonly("ranks", &Cause::ranks)
      .def_property_readonly(
          "limit", [](const Cause& cause) { return static_cast<double>(cause.limit) * nanosecond; }, "Seconds.")
      .def_readonly("reports", &Cause::reports)
      .def("encode", [](const Cause& cause) { return py::bytes(cause.encode()); })
      .def_static(
          "decode", [](const py::bytes& bytes) { return Cause::decode(std::string_view(bytes)); }, arg("bytes"))
      .def(
          "__eq__",
          [](const Cause& left, const py::object& right) {
            return py::isinstance<Cause>(right) && left.encode() == right.cast<const Cause&>().encode();
          },
          arg("other"))
      .def("__hash__", [](const Cause& cause) { return std::hash<std::string>()(cause.encode()); });
}

void register_action_log(py::module_& module) {
  py::class_<ActionLog, std::shared_ptr<ActionLog>>(
      module, "ActionLog", "A ring of this rank's latest actions; see csrc/control/action_log.hpp.")
      .def(py::init<int, std::uint32_t, const std::string&>(), arg("rank"), arg("capacity"), arg("path"))
      .def("step", &ActionLog::step)
      .def(
          "begin",
          [](ActionLog& log, std::uint64_t code) {
            log.begin(static_cast<std::uint32_t>(code >> 40), static_cast<std::uint32_t>(code >> 32) & 0xff,
                      static_cast<std::uint32_t>(code));
          },
          arg("code"),
          "stage << 40 | kind << 32 | microbatch; ends the action before it. CoreError once this step has failed.")
      .def("ready", &ActionLog::ready)
      .def("end", &ActionLog::end)
      .def("start_trace", &ActionLog::start_trace, arg("capacity"))
      .def("stop_trace", &ActionLog::stop_trace)
      .def("actions", &ActionLog::actions)
      .def("status", &ActionLog::status)
      .def("set_busy", &ActionLog::set_busy, arg("work"))
      .def(
          "set_cause",
          [](ActionLog& log, const Cause& cause, std::uint64_t step) { log.set_cause(cause.encode(), step); },
          arg("cause"), arg("step") = 0)
      .def("discard", &ActionLog::discard);

  py::class_<RecordFile>(module, "RecordFile", "What a record file holds.")
      .def_readonly("rank", &RecordFile::rank)
      .def_readonly("clock", &RecordFile::clock)
      .def_readonly("actions", &RecordFile::actions)
      .def_property_readonly("busy",
                             [](const RecordFile& record) {
                               return record.busy.empty() ? std::nullopt : std::optional(text(record.busy));
                             })
      .def_property_readonly("cause", [](const RecordFile& record) {
        return record.cause.empty() ? std::nullopt : std::optional(Cause::decode(record.cause));
      });
  module.def("read_record", &read_record, arg("path"), "Reads a record file. Raises CoreError for anything else.");
}

}  // namespace

void register_control(py::module_& module) {
  py::class_<Envelope>(module, "Envelope", "The tag of a message, and how much of the batch it is.")
      .def(py::init([](std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch, std::uint32_t layout,
                       std::uint32_t run, std::uint64_t bytes, std::uint64_t rows, std::uint64_t batch_rows) {
             return Envelope{0, stage, kind, microbatch, layout, run, bytes, rows, batch_rows};
           }),
           arg("stage"), arg("kind"), arg("microbatch"), arg("layout"), arg("run"), arg("bytes"), arg("rows"),
           arg("batch_rows"))
      .def_readonly("stage", &Envelope::stage)
      .def_readonly("kind", &Envelope::kind)
      .def_readonly("microbatch", &Envelope::microbatch)
      .def_readonly("layout", &Envelope::layout)
      .def_readonly("run", &Envelope::run)
      .def_readonly("bytes", &Envelope::bytes)
      .def_readonly("rows", &Envelope::rows)
      .def_readonly("batch_rows", &Envelope::batch_rows);

  register_status(module);
  register_cause(module);
  register_action_log(module);

  py::class_<Hub>(module, "Hub", "The control sockets of one rank, and the thread that reads them.")
      .def(py::init<int>(), arg("rank"))
      .def_property_readonly("rank", &Hub::rank)
      .def(
          "add_peer", [](Hub& hub, int rank, int descriptor) { hub.add_peer(rank, Fd(descriptor)); }, arg("rank"),
          arg("descriptor"), "Takes over a connected, authenticated stream socket.")
      .def("start", &Hub::start, Released())
      .def("abort", &Hub::abort, arg("cause"), arg("step") = 0, Released(),
           "Fails everywhere; step: the one that failed, 0: unknown.")
      .def("cause", &Hub::cause, Released())
      .def("check", &Hub::check, arg("peer"), Released())
      .def("close", &Hub::close, Released())
      .def("leave", &Hub::leave, Released())
      .def("departed", &Hub::departed)
      .def("abandon", &Hub::abandon)
      .def("set_action_log", &Hub::set_action_log, arg("log"))
      .def("share_record", &Hub::share_record, arg("peer"), arg("policy"), Released())
      .def("ask", &Hub::ask, arg("ranks"), arg("policy"), Released())
      .def(
          "prolonging",
          [](Hub& hub, WaitPolicy policy, std::size_t ranks) {
            policy.prolong = [&hub, ranks, lately = policy.timeout] { return hub.any_rank_is_busy(ranks, lately); };
            return policy;
          },
          arg("policy"), arg("ranks"), keep_alive<0, 1>(),
          "The same policy, but a timeout starts again while a rank says that it is busy.")
      .def("send_envelope", &send_envelope, arg("peer"), arg("envelope"), arg("channel"), arg("policy"), Released())
      .def("take_envelope", &take_envelope, arg("peer"), arg("channel"), arg("policy"), Released());
}

}  // namespace pypipe::python
