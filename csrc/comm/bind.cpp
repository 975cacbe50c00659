#include "comm/bind.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "comm/arena.h"
#include "comm/communicator.h"
#include "comm/pulse.h"
#include "core/check.h"

namespace py = pybind11;

namespace npuzero {
namespace {

using namespace comm;

// A region has a slot of this for each rank's part, at least; more than the largest is a mistake.
constexpr size_t least_part_bytes = 64, most_slot_bytes = size_t{1} << 30;
constexpr int most_ranks = 1 << 16;
constexpr double most_seconds = 1e9;            // beyond it a deadline is no time any more
constexpr std::uintptr_t null_page = 64 << 10;  // no memory lies below

void check_layout(int size, size_t slot_bytes) {
  require(size >= 1 && size <= most_ranks, "region: size", "1 to 65536 ranks", size);
  const size_t least = least_part_bytes * static_cast<size_t>(std::max(1, size - 1));
  require(slot_bytes >= least && slot_bytes <= most_slot_bytes && slot_bytes % least_part_bytes == 0,
          "region: slot_bytes", "a multiple of 64, at least 64 for each other rank and at most 2^30", slot_bytes);
}

void check_index(const Region& region, int index) {
  require(index >= 0 && index < region.size(), "region: index", "one of the group's ranks", index);
}

std::shared_ptr<Region> region_in_threads(int size, size_t slot_bytes) {
  check_layout(size, slot_bytes);
  return Region::in_threads(size, slot_bytes);
}

std::shared_ptr<Region> create_region(int size, size_t slot_bytes, uint64_t nonce, bool named) {
  check_layout(size, slot_bytes);
  return Region::create(size, slot_bytes, nonce, named);
}

std::shared_ptr<Region> open_region(const std::string& address, int size, size_t slot_bytes, uint64_t nonce) {
  check_layout(size, slot_bytes);
  return Region::open(address, size, slot_bytes, nonce);
}

std::unique_ptr<Communicator, InItsProcess> make_communicator(std::shared_ptr<Region> region, int index,
                                                              std::vector<int> ranks, std::vector<int> pids,
                                                              std::string name, double timeout_s) {
  check_index(*region, index);
  const auto positive = [](int pid) { return pid > 0; };
  const auto rank = [](int rank) { return rank >= 0; };
  const size_t size = static_cast<size_t>(region->size());
  require(ranks.size() == size, "communicator: ranks", "as many as the region has", ranks.size());
  require(std::all_of(ranks.begin(), ranks.end(), rank) && std::set<int>(ranks.begin(), ranks.end()).size() == size,
          "communicator: ranks", "different ranks, none negative", "others");
  require(pids.empty() || pids.size() == size, "communicator: pids", "none, or one for each rank", pids.size());
  require(std::all_of(pids.begin(), pids.end(), positive), "communicator: pids", "ids of processes", "others");
  require(timeout_s >= 0 && timeout_s <= most_seconds, "communicator: timeout_s", "0 to 1e9 seconds", timeout_s);
  require(region->post(index).presence.load() != Presence::present, "communicator: index",
          "a place in the region that is free", index);
  return std::unique_ptr<Communicator, InItsProcess>(
      new Communicator(std::move(region), index, std::move(ranks), std::move(pids), std::move(name), timeout_s));
}

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

// (kind, origin, expected, got, remedy), or None where all is well.
py::object as_tuple(const std::optional<Failure>& failure) {
  if (!failure) return py::none();
  return py::make_tuple(failure->kind, failure->origin, failure->expected, failure->got, failure->remedy);
}

void check_owner(const Communicator& communicator, const Operation& operation) {
  require(operation.owner == &communicator, "wait: operation", "one of this communicator's", "another's");
}

// `watch` is called some times a second; it may break the communicator, so that the wait ends.
py::object wait(Communicator& communicator, const OperationPointer& operation, const py::function& watch) {
  check_owner(communicator, *operation);
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
  return as_tuple(operation->failure);
}

template <class Broken, void (Broken::*Abort)(const Failure&)>
void abort_as(Broken& broken, std::string kind, int origin, std::string expected, std::string got, std::string remedy) {
  (broken.*Abort)(Failure(std::move(kind), origin, std::move(expected), std::move(got), std::move(remedy)));
}

// Whether an address can be that of `bytes`, aligned to `alignment`. What lies there only the caller knows.
bool may_lie(std::uintptr_t address, size_t bytes, size_t alignment) {
  return bytes == 0 || (address >= null_page && address + bytes > address && address % alignment == 0);
}

void check_request(const Communicator& communicator, int verb, std::uintptr_t in, std::uintptr_t out, size_t numel,
                   size_t itemsize, int wire, int result, int root) {
  require(verb >= 0 && verb <= static_cast<int>(Verb::barrier), "submit: verb", "a member of Verb", verb);
  require(itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8 || itemsize == 16, "submit: itemsize",
          "1, 2, 4, 8 or 16 bytes", itemsize);
  const size_t size = static_cast<size_t>(communicator.size()), most = PTRDIFF_MAX / itemsize / size;
  require(numel <= most, "submit: numel", "what memory can hold, of all ranks", numel);
  require(wire >= 0 && wire < dtype_kinds && result >= 0 && result < dtype_kinds, "submit: dtypes",
          "codes of _native.DTYPES", std::to_string(wire) + ", " + std::to_string(result));
  require(root >= 0 && root < communicator.size(), "submit: root", "a position in the group", root);
  const Verb kind = static_cast<Verb>(verb);
  const bool sums = kind == Verb::reduce_scatter || kind == Verb::all_reduce;
  const bool narrow = wire <= static_cast<int>(Dtype::f16);
  require(!sums || itemsize == static_cast<size_t>(npuzero::itemsize(static_cast<Dtype>(wire))), "submit: itemsize",
          "that of the dtype that is summed", itemsize);
  require(!sums || result == wire || (narrow && static_cast<Dtype>(result) == Dtype::f32 && kind != Verb::all_reduce),
          "submit: result", "the dtype that is summed, or float32 for a reduce_scatter of floats", result);
  const bool spread = kind == Verb::reduce_scatter || kind == Verb::all_to_all;
  const bool whole = kind == Verb::all_gather || kind == Verb::all_to_all;
  const size_t bytes = kind == Verb::barrier ? 0 : numel * itemsize;
  const size_t out_item = sums ? static_cast<size_t>(npuzero::itemsize(static_cast<Dtype>(result))) : itemsize;
  require(may_lie(in, bytes * (spread ? size : 1), sums ? itemsize : 1), "submit: input", "memory that can be there",
          in);
  require(may_lie(out, bytes / itemsize * out_item * (whole ? size : 1), sums ? out_item : 1), "submit: output",
          "memory that can be there", out);
}

OperationPointer submit(Communicator& communicator, int verb, std::uintptr_t in, std::uintptr_t out, size_t numel,
                        size_t itemsize, int wire, int result, bool accumulate, int root, std::string dtype,
                        std::string tag) {
  Request request;
  check_request(communicator, verb, in, out, numel, itemsize, wire, result, root);
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
      .def_static("in_threads", &region_in_threads, py::arg("size"), py::arg("slot_bytes"))
      .def_static("create", &create_region, py::arg("size"), py::arg("slot_bytes"), py::arg("nonce"), py::arg("named"))
      .def_static("open", &open_region, py::arg("address"), py::arg("size"), py::arg("slot_bytes"), py::arg("nonce"))
      .def_property_readonly("address", &Region::address)
      .def(
          "leave",
          [](Region& region, int index) {
            check_index(region, index);
            region.leave(index);
          },
          py::arg("index"), "Says that this rank will not come (again).")
      .def("abort", &abort_as<Region, &Region::fail>, py::arg("kind"), py::arg("origin"), py::arg("expected"),
           py::arg("got"), py::arg("remedy"));

  py::class_<Block>(comm, "Block", py::buffer_protocol(),
                    "Zeroed memory that the ranks of this host can read in place.")
      .def(py::init([](size_t nbytes) {
             require(nbytes <= PTRDIFF_MAX, "block: nbytes", "what memory can hold", nbytes);
             return new Block(nbytes);
           }),
           py::arg("nbytes"))
      .def_buffer(&Block::buffer);

  py::class_<Pulse>(comm, "Pulse")
      .def(py::init([](pid_t pid) {
             require(pid >= 0, "pulse: pid", "the id of a process, or 0", pid);
             return new Pulse(pid);
           }),
           py::arg("pid"))
      .def("dead", &Pulse::dead);

  py::class_<Operation, OperationPointer>(comm, "Operation")
      .def_readonly("sequence", &Operation::sequence)
      .def_property_readonly("begin_s", [](const Operation& operation) { return seconds(operation.begin); })
      .def_property_readonly("end_s", [](const Operation& operation) { return seconds(operation.end); })
      .def_readonly("refused", &Operation::refused, "The communicator was broken or closed already.");

  py::class_<Communicator, std::unique_ptr<Communicator, InItsProcess>>(comm, "Communicator")
      .def(py::init(&make_communicator), py::arg("region").none(false), py::arg("index"), py::arg("ranks"),
           py::arg("pids"), py::arg("name"), py::arg("timeout_s"))
      .def("submit", &submit, py::arg("verb"), py::arg("input"), py::arg("output"), py::arg("numel"),
           py::arg("itemsize"), py::arg("wire"), py::arg("result"), py::arg("accumulate"), py::arg("root"),
           py::arg("dtype"), py::arg("tag"))
      .def("wait", &wait, py::arg("operation").none(false), py::arg("watch"),
           "None, or (kind, origin, expected, got, remedy).")
      .def(
          "done",
          [](Communicator& communicator, const OperationPointer& operation) {
            check_owner(communicator, *operation);
            return communicator.done(operation);
          },
          py::arg("operation").none(false))
      .def("abort", &abort_as<Communicator, &Communicator::abort>, py::arg("kind"), py::arg("origin"),
           py::arg("expected"), py::arg("got"), py::arg("remedy"))
      .def(
          "failure", [](const Communicator& communicator) { return as_tuple(communicator.failure()); },
          "None, or (kind, origin, expected, got, remedy): why it takes no operation any more.")
      .def_property_readonly("looks", &Communicator::looks)
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>());

  py::enum_<Verb> verbs(comm, "Verb");
  for (int code = 0; code <= static_cast<int>(Verb::barrier); ++code) {
    verbs.value(name(static_cast<Verb>(code)), static_cast<Verb>(code));
  }
  verbs.value("recv", Verb::send);  // the other end of it
}

}  // namespace npuzero
