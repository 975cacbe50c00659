#include "comm/bind.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "comm/arena.h"
#include "comm/communicator.h"
#include "comm/pulse.h"

namespace py = pybind11;

namespace npuzero {
namespace {

using namespace comm;

// Bytes of the arena, for Python; they go back with it.
class Block {
 public:
  explicit Block(size_t bytes) : arena_(Arena::own()), bytes_(bytes), data_(arena_.allocate(bytes)) {}
  Block(const Block&) = delete;
  ~Block() { arena_.free(data_, bytes_); }

  py::buffer_info buffer() const {
    return py::buffer_info(reinterpret_cast<uint8_t*>(data_), static_cast<py::ssize_t>(bytes_));
  }

 private:
  Arena& arena_;
  const size_t bytes_;
  std::byte* const data_;
};

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

// (kind, origin, expected, got, remedy), or None where the operation went well.
py::object failure_of(const Operation& operation) {
  if (!operation.failure) return py::none();
  const Failure& failure = *operation.failure;
  return py::make_tuple(failure.kind, failure.origin, failure.expected, failure.got, failure.remedy);
}

// `watch` is called some times a second; it may break the communicator, so that the wait ends.
py::object wait(Communicator& communicator, const OperationPointer& operation, const py::function& watch) {
  const auto interrupted = [&watch] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) return true;
    try {
      watch();
    } catch (py::error_already_set& error) {
      error.restore();
      return true;
    }
    return false;
  };
  {
    const py::gil_scoped_release release;
    communicator.wait(operation, interrupted);
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return failure_of(*operation);
}

template <class Broken, void (Broken::*Abort)(const Failure&)>
void abort_as(Broken& broken, std::string kind, int origin, std::string expected, std::string got, std::string remedy) {
  (broken.*Abort)(Failure(std::move(kind), origin, std::move(expected), std::move(got), std::move(remedy)));
}

OperationPointer submit(Communicator& communicator, int verb, std::uintptr_t in, std::uintptr_t out, size_t numel,
                        size_t itemsize, int wire, int result, bool accumulate, int root, std::string dtype,
                        std::string tag) {
  Request request;
  request.verb = static_cast<Verb>(verb);
  request.in = reinterpret_cast<const std::byte*>(in);
  request.out = reinterpret_cast<std::byte*>(out);
  request.numel = numel;
  request.itemsize = itemsize;
  request.wire = static_cast<Dtype>(wire);
  request.result = static_cast<Dtype>(result);
  request.accumulate = accumulate;
  request.root = root;
  request.dtype = std::move(dtype);
  request.tag = std::move(tag);
  return communicator.submit(std::move(request));
}

}  // namespace

void bind_comm(py::module_& m) {
  py::module_ comm = m.def_submodule("comm", "Collectives over memory that ranks share; see csrc/comm/communicator.h.");

  py::class_<Region, std::shared_ptr<Region>>(comm, "Region")
      .def_static("in_threads", &Region::in_threads, py::arg("size"), py::arg("slot_bytes"))
      .def_static("create", &Region::create, py::arg("size"), py::arg("slot_bytes"), py::arg("nonce"), py::arg("named"))
      .def_static("open", &Region::open, py::arg("address"), py::arg("size"), py::arg("slot_bytes"), py::arg("nonce"))
      .def_property_readonly("address", &Region::address)
      .def("leave", &Region::leave, py::arg("index"), "Says that this rank will not come (again).")
      .def("abort", &abort_as<Region, &Region::fail>, py::arg("kind"), py::arg("origin"), py::arg("expected"),
           py::arg("got"), py::arg("remedy"));

  py::class_<Block>(comm, "Block", py::buffer_protocol(),
                    "Zeroed memory that the ranks of this host can read in place.")
      .def(py::init<size_t>(), py::arg("nbytes"))
      .def_buffer(&Block::buffer);

  py::class_<Pulse>(comm, "Pulse").def(py::init<pid_t>(), py::arg("pid")).def("dead", &Pulse::dead);

  py::class_<Operation, OperationPointer>(comm, "Operation")
      .def_readonly("sequence", &Operation::sequence)
      .def_property_readonly("begin_s", [](const Operation& operation) { return seconds(operation.begin); })
      .def_property_readonly("end_s", [](const Operation& operation) { return seconds(operation.end); })
      .def_readonly("refused", &Operation::refused, "The communicator was broken or closed already.");

  py::class_<Communicator, std::unique_ptr<Communicator, InItsProcess>>(comm, "Communicator")
      .def(py::init<std::shared_ptr<Region>, int, std::vector<int>, std::vector<int>, std::string, double>(),
           py::arg("region"), py::arg("index"), py::arg("ranks"), py::arg("pids"), py::arg("name"),
           py::arg("timeout_s"))
      .def("submit", &submit, py::arg("verb"), py::arg("input"), py::arg("output"), py::arg("numel"),
           py::arg("itemsize"), py::arg("wire"), py::arg("result"), py::arg("accumulate"), py::arg("root"),
           py::arg("dtype"), py::arg("tag"))
      .def("wait", &wait, py::arg("operation"), py::arg("watch"), "None, or (kind, origin, expected, got, remedy).")
      .def("done", &Communicator::done, py::arg("operation"))
      .def("abort", &abort_as<Communicator, &Communicator::abort>, py::arg("kind"), py::arg("origin"),
           py::arg("expected"), py::arg("got"), py::arg("remedy"))
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>());

  py::enum_<Verb> verbs(comm, "Verb");
  for (int code = 0; code <= static_cast<int>(Verb::barrier); ++code) {
    verbs.value(name(static_cast<Verb>(code)), static_cast<Verb>(code));
  }
}

}  // namespace npuzero
