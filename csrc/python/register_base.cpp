#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <exception>

#include "base/action.hpp"
#include "base/error.hpp"
#include "base/wait.hpp"
#include "python/register.hpp"

namespace py = pybind11;

namespace pypipe::python {
namespace {

PyObject* core_error = nullptr;  // lives as long as the module

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const py::object instance = py::reinterpret_borrow<py::object>(core_error)(error.what());
    instance.attr("fault") = name(error.fault());
    PyErr_SetObject(core_error, instance.ptr());
  }
}

// Called on a waiting thread that has released the GIL. Does nothing outside Python's main thread, which alone handles
// signals.
void handle_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  constexpr double most = 1e9;  // some 30 years; more would overflow nanoseconds
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(std::min(seconds, most)));
}

}  // namespace

void register_base(py::module_& module) {
  core_error = py::exception<Error>(module, "CoreError", PyExc_RuntimeError).release().ptr();
  py::reinterpret_borrow<py::object>(core_error).attr("fault") = "";
  py::register_exception_translator(&translate);

  py::enum_<ActionKind> kinds(module, "ActionKind", "Kinds of actions, as the program has them.");
  for (std::size_t number = 0; number < action_kind_names.size(); ++number) {
    kinds.value(action_kind_names[number], static_cast<ActionKind>(number));
  }

  py::class_<WaitPolicy>(module, "WaitPolicy",
                         "How long (seconds) to wait, how many polls come before parking, and "
                         "for how many seconds to poll when a wait should be about to end.")
      .def(py::init([](double timeout, std::uint32_t spins, double longest_spin) {
             WaitPolicy policy;
             policy.timeout = nanoseconds(timeout);
             policy.spins = spins;
             policy.longest_spin = nanoseconds(longest_spin);
             policy.interruption = &handle_signals;
             return policy;
           }),
           py::arg("timeout"), py::arg("spins") = 0, py::arg("longest_spin") = 0.0)
      .def_property_readonly(
          "timeout", [](const WaitPolicy& policy) { return std::chrono::duration<double>(policy.timeout).count(); })
      .def_readonly("spins", &WaitPolicy::spins)
      .def(
          "prolong", [](const WaitPolicy& policy) { return policy.prolong && policy.prolong(); },
          py::call_guard<py::gil_scoped_release>(), "Once the timeout has passed: whether to wait as long again.");
}

}  // namespace pypipe::python
