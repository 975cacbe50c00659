// Adds the submodule npuzero._C.host.
#pragma once

#include <pybind11/pybind11.h>

namespace npuzero {

void bind_host(pybind11::module_& m);

}  // namespace npuzero
