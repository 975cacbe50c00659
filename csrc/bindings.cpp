// npuzero._C: views, errors, one m.def per op. No op logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/kernel_table.h"
#include "core/view.h"
#include "cpu/dispatch/isa.h"
#include "ops/cast.h"
#include "ops/flat_adam.h"
#include "ops/norm.h"
#include "ops/pack.h"
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
  return {{CastArgs::op, devices_with<CastArgs>()},
          {FlatAdamArgs::op, devices_with<FlatAdamArgs>()},
          {NormArgs::op, devices_with<NormArgs>()},
          {PackArgs::op, devices_with<PackArgs>()}};
}

void cast(const View& source, const View& target, int rounding, uint64_t seed, uint64_t offset, Stream stream) {
  run(source.device, CastArgs{source, target, static_cast<Rounding>(rounding), seed, offset}, stream);
}

using Segment = std::tuple<int64_t, int64_t, int64_t>;  // begin, end, index of the group
using Group = std::tuple<float, float, float, float, float, float, float, float, float, bool, bool, bool>;

void flat_adam(const View& master, const View& exp_avg, const View& exp_avg_sq, const View& grad, const View* low,
               const View* max_exp_avg_sq, const View* grad_scale, const View* skip,
               const std::vector<Segment>& segments, const std::vector<Group>& groups, Stream stream) {
  std::vector<FlatAdamGroup> table;
  for (const Group& group : groups) {
    table.push_back(std::apply([](auto... field) { return FlatAdamGroup{field...}; }, group));
  }
  std::vector<FlatAdamSegment> ranges;
  int64_t covered = 0;
  for (const auto& [begin, end, group] : segments) {
    ranges.push_back({begin, end - begin, covered, &table.at(group)});
    covered += end - begin;
  }
  run(master.device,
      FlatAdamArgs{master, exp_avg, exp_avg_sq, grad, low, max_exp_avg_sq, grad_scale, skip, ranges.data(),
                   static_cast<int64_t>(ranges.size()), covered},
      stream);
}

void norm(const View& x, const View& out, const View& workspace, Stream stream) {
  run(x.device, NormArgs{x, out, workspace}, stream);
}

using Part = std::tuple<std::uintptr_t, std::uintptr_t, int64_t, int, int>;  // source, target, count, their dtypes

void pack(const std::vector<Part>& parts, float factor, const View* scale_at, bool scaled, bool accumulate, int device,
          Stream stream) {
  std::vector<PackPart> table;
  table.reserve(parts.size());
  int64_t total = 0;
  for (const auto& [source, target, count, source_dtype, target_dtype] : parts) {
    table.push_back({reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target), count, total,
                     static_cast<Dtype>(source_dtype), static_cast<Dtype>(target_dtype)});
    total += count;
  }
  const auto* scale = scale_at ? static_cast<const float*>(scale_at->data) : nullptr;
  run(static_cast<Device>(device),
      PackArgs{table.data(), static_cast<int64_t>(table.size()), total, factor, scale, scaled, accumulate}, stream);
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

  m.def("isa", &cpu::current_isa, "The instruction set that the cpu kernels run on.");
  m.def("built_isas", &cpu::built_isas, "Instruction sets in this build, worst to best.");
  m.def("supported_isas", &cpu::supported_isas, "Those of built_isas() that this machine can run.");
  m.def("use_isa", &cpu::use_isa, py::arg("isa"), "Choose one of supported_isas(), or \"auto\" for the best.");
  cpu::use_isa("auto");

  m.def("kernels", &kernels, "Which devices have a kernel, by op.");
  m.def("norm_block", [] { return norm_block; });
  m.def("cast", &cast);
  m.def("flat_adam", &flat_adam);
  m.def("norm", &norm);
  m.def("pack", &pack);

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
