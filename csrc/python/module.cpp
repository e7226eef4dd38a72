#include "python/register.hpp"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of pypipe: control sockets, links and channels. Not a public interface.";
  module.attr("__version__") = PYPIPE_VERSION;
  pypipe::python::register_base(module);
  pypipe::python::register_control(module);
  pypipe::python::register_channel(module);
  pypipe::python::register_gpu(module);
}
