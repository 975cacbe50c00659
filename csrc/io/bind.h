// Adds the submodule npuzero._C.io.
#pragma once

#include <pybind11/pybind11.h>

namespace npuzero {

void bind_io(pybind11::module_& m);

}  // namespace npuzero
