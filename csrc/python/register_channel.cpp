#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "channel/channel.hpp"
#include "link/shm/shm_link.hpp"
#include "python/register.hpp"

namespace py = pybind11;
using py::arg;
using py::keep_alive;

namespace pypipe::python {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

// A layout as its sender uses it: the id that was announced, and where each tensor goes.
struct OutgoingLayout {
  std::uint32_t id = 0;
  std::vector<Part> parts;  // data is filled in for each message
};

// A received message. Python reads it through the buffer protocol, which keeps the memory mapped.
struct Message {
  Arrival arrival;
};

OutgoingLayout announce(ChannelSender& channel, const std::string& description, const std::vector<std::size_t>& sizes,
                        std::uint32_t forgotten, const WaitPolicy& policy) {
  const std::vector<std::size_t> offsets = pack(sizes);
  OutgoingLayout layout;
  for (std::size_t i = 0; i < sizes.size(); ++i) layout.parts.push_back(Part{nullptr, sizes[i], offsets[i]});
  layout.id = channel.announce(description, offsets.back(), forgotten, policy);
  return layout;
}

std::uint64_t send(ChannelSender& channel, const OutgoingLayout& layout, std::uint32_t stage, std::uint32_t kind,
                   std::uint32_t microbatch, std::uint32_t run, std::uint64_t rows, std::uint64_t batch_rows,
                   const std::vector<std::uintptr_t>& pointers, std::uintptr_t stream, const WaitPolicy& policy) {
  if (pointers.size() != layout.parts.size()) {
    throw Error(Fault::usage, "a layout of " + std::to_string(layout.parts.size()) + " tensors got " +
                                  std::to_string(pointers.size()) + " pointers");
  }
  std::vector<Part> parts = layout.parts;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].data = reinterpret_cast<const void*>(pointers[i]);  // NOLINT(performance-no-int-to-ptr)
  }
  const Envelope envelope{0, stage, kind, microbatch, layout.id, run, 0, rows, batch_rows};
  const py::gil_scoped_release released;
  return channel.send(envelope, parts, Stream{reinterpret_cast<void*>(stream)},  // NOLINT(performance-no-int-to-ptr)
                      policy);
}

Message receive(ChannelReceiver& channel, std::uint32_t stage, std::uint32_t kind, std::uint32_t microbatch,
                std::uint32_t run, std::uintptr_t stream, const WaitPolicy& policy) {
  return Message{channel.receive(MessageTag{stage, static_cast<ActionKind>(kind), microbatch, run},
                                 Stream{reinterpret_cast<void*>(stream)},  // NOLINT(performance-no-int-to-ptr)
                                 policy)};
}

template <class Channel>
py::typing::Dict<py::str, int> counters(const Channel& channel) {
  const ChannelCounters& counted = channel.counters();
  py::typing::Dict<py::str, int> all;
  all["messages"] = counted.messages;
  all["bytes"] = counted.bytes;
  all["layouts"] = counted.layouts;
  all["allocations"] = counted.allocations;
  all["slots"] = counted.slots;
  all["slot_bytes"] = counted.slot_bytes;
  all["alive"] = counted.alive;
  all["most_alive"] = counted.most_alive;
  return all;
}

}  // namespace

void register_channel(py::module_& module) {
  module.attr("PART_ALIGNMENT") = part_alignment;
  module.def(
      "pack", [](const std::vector<std::size_t>& sizes) { return pack(sizes); }, arg("sizes"),
      "Offsets of parts of these sizes (bytes) in one message, then the message's size.");
  module.def(
      "check_tag",
      [](const Envelope& envelope, std::uint32_t channel, std::uint32_t stage, std::uint32_t kind,
         std::uint32_t microbatch, std::uint32_t run, int peer) {
        check_tag(envelope, channel, MessageTag{stage, static_cast<ActionKind>(kind), microbatch, run}, peer);
      },
      arg("envelope"), arg("channel"), arg("stage"), arg("kind"), arg("microbatch"), arg("run"), arg("peer"));

  py::class_<SendLink>(module, "SendLink");
  py::class_<ReceiveLink>(module, "ReceiveLink");
  py::class_<ShmSendLink, SendLink>(module, "ShmSendLink")
      .def(py::init<Hub&, int, std::uint32_t, std::uint32_t, const WaitPolicy&>(), arg("hub"), arg("peer"), arg("link"),
           arg("capacity"), arg("policy"), keep_alive<1, 2>(), Released());
  py::class_<ShmReceiveLink, ReceiveLink>(module, "ShmReceiveLink")
      .def(py::init<Hub&, int, std::uint32_t, std::uint32_t, const WaitPolicy&>(), arg("hub"), arg("peer"), arg("link"),
           arg("capacity"), arg("policy"), keep_alive<1, 2>(), Released());

  py::class_<OutgoingLayout>(module, "OutgoingLayout").def_readonly("id", &OutgoingLayout::id);

  py::class_<Message>(module, "Message", py::buffer_protocol())
      .def_buffer([](Message& message) {
        const Slot& slot = message.arrival.slot;
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(slot.data), static_cast<py::ssize_t>(slot.bytes));
      })
      .def_property_readonly("layout", [](const Message& message) { return message.arrival.envelope.layout; })
      .def_property_readonly("rows", [](const Message& message) { return message.arrival.envelope.rows; })
      .def_property_readonly("batch_rows", [](const Message& message) { return message.arrival.envelope.batch_rows; })
      .def_property_readonly(
          "size", [](const Message& message) { return message.arrival.envelope.bytes; }, "Bytes of the message.")
      .def_property_readonly(
          "bytes", [](const Message& message) { return message.arrival.slot.bytes; }, "Bytes of the slot.")
      .def(
          "holds",
          [](const Message& message, std::uintptr_t address) {
            return address - reinterpret_cast<std::uintptr_t>(message.arrival.slot.data) < message.arrival.slot.bytes;
          },
          arg("address"), "Whether the address lies in the slot.")
      .def_property_readonly(
          "pointer", [](const Message& message) { return reinterpret_cast<std::uintptr_t>(message.arrival.slot.data); })
      .def_property_readonly(
          "memory",
          [](const Message& message) { return reinterpret_cast<std::uintptr_t>(message.arrival.slot.owner.get()); },
          "The start of what was allocated for this slot and others.");

  py::class_<ChannelSender>(module, "ChannelSender")
      .def(py::init<Hub&, SendLink&, int, std::uint32_t, std::uint32_t>(), arg("hub"), arg("link"), arg("peer"),
           arg("channel"), arg("slots"), keep_alive<1, 2>(), keep_alive<1, 3>())
      .def("announce", &announce, arg("description"), arg("sizes"), arg("forgotten"), arg("policy"), Released())
      .def("send", &send, arg("layout"), arg("stage"), arg("kind"), arg("microbatch"), arg("run"), arg("rows"),
           arg("batch_rows"), arg("pointers"), arg("stream"), arg("policy"))
      .def("has_room", &ChannelSender::has_room)
      .def("sent", &ChannelSender::sent)
      .def(
          "finish",
          [](ChannelSender& channel, std::uintptr_t stream) {
            channel.finish(Stream{reinterpret_cast<void*>(stream)});  // NOLINT(performance-no-int-to-ptr)
          },
          arg("stream"), Released())
      .def_property_readonly("counters", &counters<ChannelSender>);

  py::class_<ChannelReceiver>(module, "ChannelReceiver")
      .def(py::init<Hub&, ReceiveLink&, int, std::uint32_t, std::uint32_t>(), arg("hub"), arg("link"), arg("peer"),
           arg("channel"), arg("slots"), keep_alive<1, 2>(), keep_alive<1, 3>())
      .def("begin", &ChannelReceiver::begin, arg("run"),
           "Begins a run whose messages are promised to be those of the first run of this number.")
      .def(
          "post",
          [](ChannelReceiver& channel, std::uintptr_t stream, const WaitPolicy& policy) {
            channel.post(Stream{reinterpret_cast<void*>(stream)}, policy);  // NOLINT(performance-no-int-to-ptr)
          },
          arg("stream"), arg("policy"), Released())
      .def("receive", &receive, arg("stage"), arg("kind"), arg("microbatch"), arg("run"), arg("stream"), arg("policy"),
           Released())
      .def(
          "description",
          [](ChannelReceiver& channel, std::uint32_t layout, const WaitPolicy& policy) {
            return channel.layout(layout, policy).description;
          },
          arg("layout"), arg("policy"))
      .def(
          "release",
          [](ChannelReceiver& channel, const Message& message, std::uintptr_t stream) {
            channel.release(message.arrival.slot,
                            Stream{reinterpret_cast<void*>(stream)});  // NOLINT(performance-no-int-to-ptr)
          },
          arg("message"), arg("stream"))
      .def_property_readonly("counters", &counters<ChannelReceiver>);

  py::class_<LayoutAnnouncer>(module, "LayoutAnnouncer")
      .def(py::init<Hub&, int, std::uint32_t>(), arg("hub"), arg("peer"), arg("channel"), keep_alive<1, 2>())
      .def("announce", &LayoutAnnouncer::announce, arg("description"), arg("bytes"), arg("forgotten"), arg("policy"),
           Released());
  py::class_<LayoutBook>(module, "LayoutBook")
      .def(py::init<Hub&, int, std::uint32_t>(), arg("hub"), arg("peer"), arg("channel"), keep_alive<1, 2>())
      .def(
          "description",
          [](LayoutBook& book, std::uint32_t layout, const WaitPolicy& policy) {
            return book.find(layout, policy).description;
          },
          arg("layout"), arg("policy"), Released())
      .def_property_readonly("received", &LayoutBook::received);
}

}  // namespace pypipe::python
