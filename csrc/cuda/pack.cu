// The contract is in ops/pack.h. The parts travel in the kernel's parameters: a thousand tensors are one launch.
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "ops/pack.h"

namespace npuzero::cuda {
namespace {

enum class Mode { copy, scale, accumulate };

struct Part {
  const void* source;
  void* target;
  int64_t count_and_dtypes;  // dtypes in the low four bits, two each: a table has room for more parts so

  Part() = default;
  explicit Part(const PackPart& part)
      : source(part.source),
        target(part.target),
        count_and_dtypes(part.count << 4 | static_cast<int64_t>(part.source_dtype) << 2 |
                         static_cast<int64_t>(part.target_dtype)) {}

  __device__ int64_t count() const { return count_and_dtypes >> 4; }
  __device__ Dtype source_dtype() const { return static_cast<Dtype>(count_and_dtypes >> 2 & 3); }
  __device__ Dtype target_dtype() const { return static_cast<Dtype>(count_and_dtypes & 3); }
};

constexpr int few = 64;
constexpr int many = (parameter_bytes - 64) / (sizeof(Part) + sizeof(uint32_t));

template <class Source, class Target, Mode mode>
__device__ void move(const Part& part, int64_t begin, float scale) {
  const auto* source = static_cast<const typename Source::Bits*>(part.source);
  auto* target = static_cast<typename Target::Bits*>(part.target);
  Group<typename Source::Bits> in[in_flight];
  Group<typename Target::Bits> out[in_flight];
#pragma unroll
  for (int u = 0; u < in_flight; ++u) {
    const Span span{begin + u * stride, part.count()};
    in[u] = load(source, span);
    if constexpr (mode == Mode::accumulate) out[u] = load(target, span);
  }
#pragma unroll
  for (int u = 0; u < in_flight; ++u) {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const auto x = in[u].at[k];
      auto& y = out[u].at[k];
      if constexpr (mode == Mode::accumulate) {
        y = Target::round(Target::widen(y) + Source::widen(x) * scale);
      } else if constexpr (mode == Mode::scale) {
        y = Target::round(Source::widen(x) * scale);
      } else if constexpr (std::is_same_v<Source, Target>) {
        y = x;
      } else {
        y = Target::round(Source::widen(x));
      }
    }
    store(target, Span{begin + u * stride, part.count()}, out[u]);
  }
}

template <Mode mode, int capacity>
__global__ void __launch_bounds__(threads)
    pack_parts(const __grid_constant__ Table<Part, capacity> table, float factor, const float* scale_at) {
  const float scale = scale_at ? factor * *scale_at : factor;
  for_chunks(table, [&](const Part& part, int64_t begin) {
    with_float(part.source_dtype(), [&](auto source) {
      with_float(part.target_dtype(),
                 [&](auto target) { move<decltype(source), decltype(target), mode>(part, begin, scale); });
    });
  });
}

template <Mode mode, int capacity>
void run(const PackArgs& args, Stream stream) {
  Table<Part, capacity> table;
  const auto flush = [&] {
    if (table.chunks() == 0) return;
    launch(PackArgs::op, pack_parts<mode, capacity>, grid_for(table.chunks()), threads, stream, table, args.factor,
           args.scale_at);
    table.count = 0;
  };
  for (int64_t i = 0; i < args.part_count; ++i) {
    const Part part(args.parts[i]);
    if (args.parts[i].count == 0 || table.add(part, args.parts[i].count)) continue;
    flush();
    table.add(part, args.parts[i].count);
  }
  flush();
}

template <Mode mode>
void run(const PackArgs& args, Stream stream) {
  args.part_count <= few ? run<mode, few>(args, stream) : run<mode, many>(args, stream);
}

}  // namespace

void pack(const PackArgs& args, Stream stream) {
  if (args.accumulate) {
    run<Mode::accumulate>(args, stream);
  } else if (args.scaled) {
    run<Mode::scale>(args, stream);
  } else {
    run<Mode::copy>(args, stream);
  }
}

}  // namespace npuzero::cuda
