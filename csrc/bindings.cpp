// npuzero._C: views, errors, one function per op of ops/ops.h. No op logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/kernel_table.h"
#include "core/view.h"
#include "cpu/dispatch/isa.h"
#include "npu/host/kernels.h"
#include "ops/ops.h"
#ifdef NPUZERO_BUILT_cuda
#include "cuda/ops.h"
#endif
#ifdef NPUZERO_HAS_COMM
#include "comm/bind.h"
#endif
#ifdef NPUZERO_HAS_IO
#include "io/bind.h"
#endif
#ifdef NPUZERO_HAS_HOST
#include "host/bind.h"
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

// The GIL is free while a kernel runs.
template <class Args>
void run(Device device, const Args& args, Stream stream) {
  const py::gil_scoped_release others_may_run;
  run_kernel(device, args, stream);
}

// Which devices have a kernel for the op.
template <class Args>
std::vector<std::string> devices_with() {
  std::vector<std::string> names;
  for (const Device device : {Device::cpu, Device::cuda, Device::npu}) {
    if (has_kernel<Args>(device)) names.emplace_back(name(device));
  }
  return names;
}

std::map<std::string, std::vector<std::string>> kernels() {
#define NPUZERO_DEVICES(op, Args) {#op, devices_with<Args>()},
  return {NPUZERO_OPS(NPUZERO_DEVICES)};
}

Dtype dtype_of(int code) {
  require(code >= 0 && code < dtype_kinds, "dtype", "a code of _native.DTYPES", code);
  return static_cast<Dtype>(code);
}

Device device_of(int code) {
  require(code >= 0 && code < device_kinds, "device", "a code of _native.DEVICES", code);
  return static_cast<Device>(code);
}

bool is_float(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16; }

// Elements that may lie at an address: none at null, and not beyond the end of memory.
void check_memory(std::uintptr_t address, int64_t count, Dtype dtype, const char* subject) {
  require(count >= 0 && count <= PTRDIFF_MAX / itemsize(dtype), subject, "a number of elements that memory can hold",
          count);
  const std::uintptr_t bytes = static_cast<std::uintptr_t>(count * itemsize(dtype));
  require(count == 0 || (address != 0 && address + bytes > address), subject, "an address of memory", address);
}

void check_floats(const View& view, int64_t count, const char* subject) {
  require(is_float(view.dtype), subject, "float32, bfloat16 or float16", name(view.dtype));
  require(view.count == count, subject, "as many elements as the others", view.count);
}

const float* f32_at(const View* view) {
  if (view == nullptr) return nullptr;
  require(view->dtype == Dtype::f32 && view->count >= 1, "scalar", "float32[1]", view->count);
  return static_cast<const float*>(view->data);
}

// The first two spans that share memory, in the order of their addresses: (earlier, later), their indices. Of each pair
// at least one must be among the first `written` spans; those that are only read may share memory with each other.
std::optional<std::pair<size_t, size_t>> overlap(const std::vector<std::uintptr_t>& begins,
                                                 const std::vector<std::uintptr_t>& bytes, size_t written) {
  require(begins.size() == bytes.size(), "overlap", "as many sizes as addresses", bytes.size());
  std::vector<size_t> order;
  for (size_t i = 0; i < begins.size(); ++i) {
    if (bytes[i] > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return begins[a] < begins[b]; });
  struct Reach {
    std::uintptr_t end = 0;
    size_t index = 0;
  } any, any_written;  // which span reaches farthest so far
  for (const size_t i : order) {
    const Reach& other = i < written ? any : any_written;
    if (begins[i] < other.end) return std::pair{other.index, i};
    const Reach mine{begins[i] + bytes[i], i};
    if (mine.end > any.end) any = mine;
    if (i < written && mine.end > any_written.end) any_written = mine;
  }
  return std::nullopt;
}

void cast(const View& source, const View& target, int rounding, uint64_t seed, uint64_t offset, Stream stream) {
  require(rounding >= 0 && rounding <= static_cast<int>(Rounding::away), "cast: rounding", "0 to 3", rounding);
  check_floats(source, source.count, "cast: src");
  check_floats(target, source.count, "cast: dst");
  run(source.device, CastArgs{source, target, static_cast<Rounding>(rounding), seed, offset}, stream);
}

using Range = std::tuple<int64_t, int64_t, int64_t, uint32_t, int64_t>;  // begin, end, group, stream, place
// Addresses of master, moments, low, remainder, grad (0 where absent); count; dtypes of master, the moments, low, grad.
template <class Args>
struct Buffers {
  std::uintptr_t master, moments[Args::moment_count], low, remainder, grad;
  int64_t count;
  Dtype master_dtype, moment_dtype, low_dtype, grad_dtype;

  explicit Buffers(const py::tuple& row) {
    size_t i = 0;
    const auto take = [&](std::uintptr_t& address) { address = row[i++].cast<std::uintptr_t>(); };
    take(master);
    for (std::uintptr_t& address : moments) take(address);
    for (auto* address : {&low, &remainder, &grad}) take(*address);
    count = row[i++].cast<int64_t>();
    for (Dtype* dtype : {&master_dtype, &moment_dtype, &low_dtype, &grad_dtype}) {
      *dtype = dtype_of(row[i++].cast<int>());
    }
    const std::string op = Args::op;
    check_memory(master, count, master_dtype, (op + ": master").c_str());
    for (int k = 0; k < Args::least_moments; ++k) {
      check_memory(moments[k], count, moment_dtype, (op + ": " + Args::moment_names[k]).c_str());
    }
    check_memory(grad, count, grad_dtype, (op + ": grad").c_str());
  }
};

// Element `first` of a buffer; null where there is none.
void* at(std::uintptr_t address, int64_t first, Dtype dtype) {
  return address ? reinterpret_cast<void*>(address + first * itemsize(dtype)) : nullptr;
}

// A buffer's part from element `first`; of codes, the exponents follow all `count` of them.
Moment moment_at(std::uintptr_t address, int64_t first, int64_t count, Dtype dtype) {
  auto* exponents = static_cast<uint8_t*>(at(address, count, Dtype::u8));
  return {at(address, first, dtype), exponents ? exponents + first / moment_block : nullptr};
}

// The buffers lie end to end on a line, and the ranges are ranges of it: one part for each that meets the other.
template <class Args>
std::vector<typename Args::Part> parts_of(const std::vector<py::tuple>& line, const std::vector<Range>& ranges) {
  std::vector<typename Args::Part> parts;
  parts.reserve(line.size() + ranges.size());
  int64_t start = 0, covered = 0;
  size_t next = 0;
  for (const py::tuple& row : line) {
    const Buffers<Args> b(row);
    for (size_t i = next; i < ranges.size() && std::get<0>(ranges[i]) < start + b.count; ++i) {
      const auto& [begin, end, group, stream, place] = ranges[i];
      const int64_t first = std::max(begin - start, int64_t{0}), last = std::min(end - start, b.count);
      typename Args::Part part = {at(b.master, first, b.master_dtype),
                                  static_cast<int16_t*>(at(b.remainder, first, Dtype::i16)),
                                  {},
                                  at(b.grad, first, b.grad_dtype),
                                  at(b.low, first, b.low_dtype),
                                  last - first,
                                  covered,
                                  group,
                                  place + start + first - begin,
                                  stream,
                                  b.master_dtype,
                                  b.moment_dtype,
                                  b.grad_dtype,
                                  b.low_dtype};
      for (int k = 0; k < Args::moment_count; ++k) {
        part.moments[k] = moment_at(b.moments[k], first, b.count, b.moment_dtype);
      }
      parts.push_back(part);
      covered += last - first;
      next = end <= start + b.count ? i + 1 : i;
    }
    start += b.count;
  }
  return parts;
}

// An update of core/flat.h. Fields: a tuple of the group's.
template <class Args, class Fields>
void update(const std::vector<py::tuple>& line, const std::vector<Range>& ranges, const std::vector<Fields>& groups,
            const View* grad_scale, const View* skip, const View* dynamic, uint64_t seed, int device, Stream stream) {
  std::vector<typename Args::Group> table;
  for (const Fields& group : groups) {
    table.push_back(std::apply([](auto... field) { return typename Args::Group{field...}; }, group));
  }
  for (const auto& [begin, end, group, stream, place] : ranges) {
    require(begin >= 0 && begin <= end, "update: range", "0 <= begin <= end", begin);
    require(group >= 0 && group < static_cast<int64_t>(table.size()), "update: group", "one that is given", group);
    require(place >= 0, "update: place", "at least 0", place);
  }
  const std::vector<typename Args::Part> parts = parts_of<Args>(line, ranges);
  const int64_t total = parts.empty() ? 0 : parts.back().line + parts.back().count;
  Args args;
  args.parts = parts.data(), args.part_count = static_cast<int64_t>(parts.size()), args.total = total;
  args.groups = table.data(), args.seed = seed;
  args.grad_scale = f32_at(grad_scale), args.skip = f32_at(skip), args.dynamic = f32_at(dynamic);
  run(device_of(device), args, stream);
}

// The fields of FlatAdamGroup and FlatLionGroup.
using AdamFields =
    std::tuple<float, float, float, float, float, float, float, float, float, bool, bool, bool, uint32_t, int64_t>;
using LionFields = std::tuple<float, float, float, float, float, float, bool, uint32_t, int64_t>;
constexpr auto flat_adam = &update<FlatAdamArgs, AdamFields>;
constexpr auto flat_lion = &update<FlatLionArgs, LionFields>;

void norm(const View& x, const View& out, const View& workspace, const View* addend, float scale, Stream stream) {
  check_floats(x, x.count, "norm: x");
  require(out.dtype == Dtype::f64 && out.count >= 2, "norm: out", "float64[2]", out.count);
  require(workspace.dtype == Dtype::f64 && workspace.count >= 2 * norm_blocks(x.count), "norm: workspace",
          "two float64 a block", workspace.count);
  if (addend != nullptr) check_floats(*addend, x.count, "norm: addend");
  run(x.device, NormArgs{x, out, workspace, addend, scale}, stream);
}

constexpr int64_t max_messages = INT32_MAX;

// `rows` times `pieces` messages of n elements in all pieces together.
void check_messages(const View& messages, int64_t n, int64_t rows, int64_t pieces, int bits, const std::string& op) {
  require(bits == 8 || bits == 4, (op + ": bits").c_str(), "8 or 4", bits);
  require(rows >= 1 && rows <= max_messages, (op + ": rows").c_str(), "1 to 2^31 - 1", rows);
  require(pieces >= 1 && pieces <= max_messages, (op + ": pieces").c_str(), "1 to 2^31 - 1", pieces);
  require(n % (pieces * wire_block(bits)) == 0, (op + ": pieces").c_str(), "whole blocks in each", n);
  const int64_t message = message_bytes(n / pieces, bits);
  require(messages.dtype == Dtype::u8 && messages.count % (rows * pieces) == 0 &&
              messages.count / (rows * pieces) == message,
          (op + ": message").c_str(), "the bytes of one for each row and piece", messages.count);
  require(reinterpret_cast<std::uintptr_t>(messages.data) % message_start == 0, (op + ": message").c_str(),
          "a start at a multiple of 64 bytes", messages.data);
}

void quantize(const View& source, const View& message, const View* residual, int64_t pieces, int bits, Stream stream) {
  check_floats(source, source.count, "quantize: source");
  check_messages(message, source.count, 1, pieces, bits, "quantize");
  if (residual != nullptr) {
    require(residual->dtype == Dtype::f32 && residual->count == source.count, "quantize: residual",
            "float32, as long as the source", residual->count);
  }
  auto* rest = residual ? static_cast<float*>(residual->data) : nullptr;
  run(source.device, QuantizeArgs{source, message, rest, pieces, bits}, stream);
}

void dequantize_sum(const View& messages, const View& out, int64_t rows, int64_t pieces, int bits, bool accumulate,
                    Stream stream) {
  check_floats(out, out.count, "dequantize_sum: out");
  check_messages(messages, out.count, rows, pieces, bits, "dequantize_sum");
  run(out.device, DequantizeSumArgs{messages, out, rows, pieces, bits, accumulate}, stream);
}

using Part = std::tuple<std::uintptr_t, std::uintptr_t, int64_t, int, int>;  // source, target, count, their dtypes

void pack(const std::vector<Part>& parts, float factor, const View* scale_at, bool scaled, bool accumulate, int device,
          Stream stream) {
  std::vector<PackPart> table;
  table.reserve(parts.size());
  int64_t total = 0;
  for (const auto& [source, target, count, source_dtype, target_dtype] : parts) {
    const Dtype from = dtype_of(source_dtype), to = dtype_of(target_dtype);
    require(is_float(from) && is_float(to), "pack: dtypes", "float32, bfloat16 or float16", name(from));
    check_memory(source, count, from, "pack: source");
    check_memory(target, count, to, "pack: target");
    table.push_back({reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target), count, total, from, to});
    total += count;
  }
  run(device_of(device),
      PackArgs{table.data(), static_cast<int64_t>(table.size()), total, factor, f32_at(scale_at), scaled, accumulate},
      stream);
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
             const View view{reinterpret_cast<void*>(data), count, dtype_of(dtype), device_of(device)};
             check_memory(data, count, view.dtype, "view");
             return view;
           }),
           py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("device"))
      .def_property_readonly("data", [](const View& view) { return reinterpret_cast<std::uintptr_t>(view.data); })
      .def_readonly("count", &View::count)
      .def_property_readonly("dtype", [](const View& view) { return static_cast<int>(view.dtype); });

  m.def("isa", &cpu::current_isa, "The instruction set that the cpu kernels run on.");
  m.def("built_isas", &cpu::built_isas, "Instruction sets in this build, worst to best.");
  m.def("supported_isas", &cpu::supported_isas, "Those of built_isas() that this machine can run.");
  m.def("use_isa", &cpu::use_isa, py::arg("isa"), "Choose one of supported_isas(), or \"auto\" for the best.");
  cpu::use_isa("auto");
#ifdef NPUZERO_BUILT_cuda
  cuda::fill();
#endif

  m.def("overlap", &overlap, py::arg("begins"), py::arg("bytes"), py::arg("written"),
        "Indices of two spans that share memory, at least one of them among the first `written`; or None.");
  m.def("kernels", &kernels, "Which devices have a kernel, by op.");
  m.def(
      "use_npu_kernels", &npu::use_kernels, py::arg("library"),
      "Take the npu kernels from a library that `npuzero build-npu` made, loaded at the first launch; \"\" for none.");
  m.def("npu_kernels", &npu::kernels_in_use, "The library that the npu kernels are taken from, or \"\".");
  m.def("npu_launches", &npu::largest_launches, "Vector cores of each npu kernel's largest launch in this process.");
  m.def("norm_block", [] { return norm_block; });
  m.def(
      "message_bytes",
      [](int64_t numel, int bits) {
        require(bits == 8 || bits == 4, "message_bytes: bits", "8 or 4", bits);
        require(numel >= 0 && numel <= PTRDIFF_MAX / 2 && numel % wire_block(bits) == 0, "message_bytes: numel",
                "whole blocks", numel);
        return message_bytes(numel, bits);
      },
      py::arg("numel"), py::arg("bits"), "Bytes of a message (core/wire.h) of so many elements.");
#define NPUZERO_DEFINE(op, Args) m.def(#op, op);
  NPUZERO_OPS(NPUZERO_DEFINE)

#ifdef NPUZERO_HAS_COMM
  bind_comm(m);
#endif
#ifdef NPUZERO_HAS_IO
  bind_io(m);
#endif
#ifdef NPUZERO_HAS_HOST
  bind_host(m);
#endif
}
