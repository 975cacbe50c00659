#include "host/bind.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "host/pages.h"

namespace py = pybind11;

namespace npuzero {

void bind_host(py::module_& m) {
  using namespace host;
  py::module_ module = m.def_submodule("host", "Host memory whose pages come and go; see csrc/host/pages.h.");
  py::class_<Stock, std::shared_ptr<Stock>>(module, "Stock")
      .def(py::init<>())
      .def("trim", &Stock::trim, "Give the memory of idle pages back to the system.");
  py::class_<Pages>(module, "Pages", py::buffer_protocol(), "A buffer of bytes at a fixed address; released at first.")
      .def(py::init([](std::shared_ptr<Stock> stock, size_t nbytes) {
             require(nbytes <= PTRDIFF_MAX - (1 << 30), "pages: nbytes", "what memory can hold", nbytes);
             return new Pages(std::move(stock), nbytes);
           }),
           py::arg("stock").none(false), py::arg("nbytes"))
      .def("restore", &Pages::restore, "Have memory behind the address; its contents are undefined.")
      .def("release", &Pages::release, "Give the memory back; the address stays.")
      .def_buffer([](Pages& pages) {
        const auto length = static_cast<py::ssize_t>(pages.bytes());
        return py::buffer_info(pages.data(), 1, "B", 1, {length}, {py::ssize_t{1}});
      });
  module.def(
      "vacate",
      [](uintptr_t begin, size_t nbytes) {
        py::gil_scoped_release free;
        vacate(reinterpret_cast<std::byte*>(begin), nbytes);
      },
      py::arg("begin"), py::arg("nbytes"), "Give the memory of a range back to the system; its bytes are zero then.");
}

}  // namespace npuzero
