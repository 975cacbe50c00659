// Adds the submodule npuzero._C.comm.
#pragma once

#include <pybind11/pybind11.h>

namespace npuzero {

void bind_comm(pybind11::module_& m);

}  // namespace npuzero
