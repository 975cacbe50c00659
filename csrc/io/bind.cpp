#include "io/bind.h"

#include <pybind11/stl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "core/check.h"
#include "io/crc32c.h"
#include "io/store.h"
#include "io/system.h"

namespace py = pybind11;

namespace npuzero {
namespace {

constexpr int most_threads = 256;
constexpr int64_t whole_page = io::page_bytes;
using io::Store;

// What `make` returns; the system's refusal becomes an OSError with its number and text.
template <class Make>
auto or_os_error(const Make& make) {
  try {
    const py::gil_scoped_release release;
    return make();
  } catch (const std::system_error& error) {
    const py::gil_scoped_acquire gil;
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    throw py::error_already_set();
  }
}

std::unique_ptr<Store, io::InItsOwnProcess> make_store(const std::vector<std::string>& folders, int64_t bytes,
                                                       int threads, bool verify) {
  require(!folders.empty(), "store: folders", "one at least", 0);
  require(bytes >= 0 && bytes % whole_page == 0, "store: bytes", "whole pages of 4096 bytes", bytes);
  require(threads >= 1 && threads <= most_threads, "store: threads", "1 to 256", threads);
  return or_os_error(
      [&] { return std::unique_ptr<Store, io::InItsOwnProcess>(new Store(folders, bytes, threads, verify)); });
}

std::shared_ptr<io::Request> submit_request(Store& store, bool write, int64_t offset, std::uintptr_t address,
                                            int64_t bytes) {
  require(bytes >= 0 && bytes % whole_page == 0, "store: bytes", "whole pages of 4096 bytes", bytes);
  require(offset >= 0 && offset % whole_page == 0 && offset <= store.bytes() - bytes, "store: offset",
          "a page within the store", offset);
  require(address % io::page_bytes == 0 && (bytes == 0 || address != 0), "store: address", "that of a page", address);
  return store.submit(write ? io::Verb::write : io::Verb::read, offset, reinterpret_cast<std::byte*>(address),
                      static_cast<size_t>(bytes));
}

// (kind, folder, offset in its file, error of the system), or None where it went well.
py::object wait_for(const io::Request& request) {
  const auto interrupted = [] {
    const py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  };
  bool done;
  {
    const py::gil_scoped_release release;
    done = request.wait(interrupted);
  }
  if (!done) throw py::error_already_set();
  const std::optional<io::Trouble> trouble = request.trouble();
  if (!trouble) return py::none();
  const auto& [kind, error, offset] = trouble->failure;
  return py::make_tuple(kind, trouble->folder, offset, error);
}

uint32_t checksum(const std::string& way, const py::buffer& data) {
  const py::buffer_info info = data.request();
  require(info.ndim <= 1 && (info.ndim == 0 || info.strides[0] == info.itemsize), "crc32c: data", "contiguous bytes",
          info.ndim);
  const auto bytes = static_cast<size_t>(info.size * info.itemsize);
  const py::gil_scoped_release release;
  return way.empty() ? io::crc32c(info.ptr, bytes) : io::crc32c_by(way, info.ptr, bytes);
}

}  // namespace

void bind_io(py::module_& m) {
  py::module_ module = m.def_submodule("io", "Bytes in files without names; see csrc/io/store.h.");

  py::enum_<io::Failure::Kind>(module, "Kind")
      .value("failed", io::Failure::Kind::failed)
      .value("ended", io::Failure::Kind::ended)
      .value("damaged", io::Failure::Kind::damaged);

  py::class_<io::Request, std::shared_ptr<io::Request>>(module, "Request")
      .def("done", &io::Request::done)
      .def("wait", &wait_for, "None, or (kind, folder, offset in its file, error of the system).");

  py::class_<Store, std::unique_ptr<Store, io::InItsOwnProcess>>(module, "Store")
      .def(py::init(&make_store), py::arg("folders"), py::arg("bytes"), py::arg("threads"), py::arg("verify"))
      .def_property_readonly("direct", &Store::direct)
      .def("submit", &submit_request, py::arg("write"), py::arg("offset"), py::arg("address"), py::arg("bytes"),
           "A request, which the memory must outlast; None once the store is closed.")
      .def("close", &Store::close, py::call_guard<py::gil_scoped_release>());

  module.def("share", &Store::share, py::arg("bytes"), py::arg("folders"), py::arg("folder"),
             "The part of so many bytes that lies in one of the folders.");
  module.def(
      "is_memory", [](const std::string& folder) { return or_os_error([&] { return io::is_memory(folder); }); },
      py::arg("folder"), "Whether files in the folder are memory (tmpfs).");
  module.def("crc32c", [](const py::buffer& data) { return checksum("", data); }, py::arg("data"));
  module.def("crc32c_by", &checksum, py::arg("way"), py::arg("data"), "In one of the crc32c_ways().");
  module.def("crc32c_ways", &io::crc32c_ways);

  py::enum_<io::Call>(module, "Call")
      .value("nameless", io::Call::nameless)
      .value("direct", io::Call::direct)
      .value("allocate", io::Call::allocate)
      .value("read", io::Call::read)
      .value("write", io::Call::write);
  module.def(
      "inject",
      [](io::Call call, int64_t after, int64_t times, int error, int64_t most, bool flip) {
        require(after >= 0 && times >= -1 && error >= 0 && most >= -1, "inject", "counts", after);
        io::inject({call, after, times, error, most < 0 ? SIZE_MAX : static_cast<size_t>(most), flip});
      },
      py::arg("call"), py::kw_only(), py::arg("after") = 0, py::arg("times") = 1, py::arg("error") = 0,
      py::arg("most") = -1, py::arg("flip") = false, "A fault of the system's, for tests; csrc/io/system.h.");
  module.def("heal", &io::heal, "No faults any more.");
}

}  // namespace npuzero
