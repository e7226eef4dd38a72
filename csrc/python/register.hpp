// One register function per concept; module.cpp is their table of contents.
#pragma once

#include <pybind11/pybind11.h>

namespace pypipe::python {

void register_base(pybind11::module_& module);
void register_control(pybind11::module_& module);
void register_channel(pybind11::module_& module);
void register_gpu(pybind11::module_& module);

}  // namespace pypipe::python
