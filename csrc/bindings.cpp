// npuzero._C: views, errors, one m.def per op. No op logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/check.h"
#include "core/kernel_table.h"
#include "core/view.h"
#include "cpu/dispatch/isa.h"
#ifdef NPUZERO_HAS_COMM
#include "comm/bind.h"
#endif
#ifdef NPUZERO_HAS_IO
#include "io/bind.h"
#endif

namespace py = pybind11;
using namespace npuzero;

namespace {

// A C++ Error becomes the class of the same name in npuzero.errors, with its parts as fields.
void raise_in_python(const Error& error) {
  const py::object kind = py::module_::import("npuzero.errors").attr(error.python_name());
  const py::object value = kind(error.subject, py::arg("expected") = error.expected, py::arg("got") = error.got,
                                py::arg("do") = error.remedy);
  PyErr_SetObject(kind.ptr(), value.ptr());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });

  py::class_<View>(m, "View", "Pointer, count, dtype and device of a contiguous tensor; keeps nothing alive.")
      .def(py::init([](std::uintptr_t data, int64_t count, int dtype, int device) {
             return View{reinterpret_cast<void*>(data), count, static_cast<Dtype>(dtype), static_cast<Device>(device)};
           }),
           py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("device"));

  m.def("isa", &cpu::current_isa, "The instruction set the cpu kernels run on.");
  m.def("built_isas", &cpu::built_isas, "Instruction sets in this build, worst to best.");
  m.def("supported_isas", &cpu::supported_isas, "Those of built_isas() that this machine can run.");
  m.def("use_isa", &cpu::use_isa, py::arg("isa"), "Choose one of supported_isas(); \"\" is the best.");
  cpu::use_isa("");

#ifdef NPUZERO_HAS_COMM
  bind_comm(m);
#endif
#ifdef NPUZERO_HAS_IO
  bind_io(m);
#endif
}
