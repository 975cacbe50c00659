// The contract is in ops/pack.h. The parts travel in the kernel's parameters: a thousand tensors are one launch.
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "ops/pack.h"

namespace npuzero::cuda {
namespace {

struct Part {
  const void* source;
  void* target;
  int64_t
      packed;  // count, whether both ends are accessible, dtypes of two bits each: a table has room for more parts so

  Part() = default;
  explicit Part(const PackPart& part)
      : source(part.source),
        target(part.target),
        packed(part.count << 5 |
               (accessible(part.source, part.source_dtype) && accessible(part.target, part.target_dtype)) << 4 |
               static_cast<int64_t>(part.source_dtype) << 2 | static_cast<int64_t>(part.target_dtype)) {}

  __device__ int64_t count() const { return packed >> 5; }
  __device__ bool in_accesses() const { return packed >> 4 & 1; }
  __device__ Dtype source_dtype() const { return static_cast<Dtype>(packed >> 2 & 3); }
  __device__ Dtype target_dtype() const { return static_cast<Dtype>(packed & 3); }
};

constexpr int few = 64;
constexpr int many = (parameter_bytes - 64) / (sizeof(Part) + sizeof(uint32_t));

template <bool accumulate>
__device__ void move(const Part& part, int64_t begin, float scale, bool scaled) {
  const Dtype from = part.source_dtype(), to = part.target_dtype();
  const bool whole = part.in_accesses() && begin + chunk <= part.count();
  const Span start = whole ? together(begin, part.count()) : side_by_side(begin, part.count());
  Raw values[rows], sums[rows];
  with_access(whole, [&](auto access) {
    load<access.value>(values, part.source, from, start);
    if constexpr (accumulate) load<access.value>(sums, part.target, to, start);
  });
  if (accumulate || scaled || from != to) {
    widen(values, from);
    if constexpr (accumulate) widen(sums, to);
#pragma unroll
    for (int u = 0; u < rows; ++u) {
#pragma unroll
      for (int k = 0; k < group; ++k) {
        float& x = values[u].wide.at[k];
        x = x * scale;
        if constexpr (accumulate) x = sums[u].wide.at[k] + x;
      }
    }
    round(values, to);
  }
  with_access(whole, [&](auto access) { store<access.value>(part.target, to, start, values); });
}

template <bool accumulate, int capacity>
__global__ void __launch_bounds__(threads, accumulate ? 2 : 6)  // as many as spill no register
    pack_parts(const __grid_constant__ Table<Part, capacity> table, float factor, const float* scale_at, bool scaled) {
  const float scale = scale_at ? factor * *scale_at : factor;
  for_chunks(table, [&](const Part& part, int64_t begin) { move<accumulate>(part, begin, scale, scaled); });
}

template <bool accumulate, int capacity>
void run(const PackArgs& args, Stream stream) {
  Table<Part, capacity> table;
  const auto flush = [&] {
    if (table.chunks() == 0) return;
    launch_over<pack_parts<accumulate, capacity>>(PackArgs::op, table.chunks(), stream, table, args.factor,
                                                  args.scale_at, args.scaled);
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

template <bool accumulate>
void run(const PackArgs& args, Stream stream) {
  args.part_count <= few ? run<accumulate, few>(args, stream) : run<accumulate, many>(args, stream);
}

}  // namespace

void pack(const PackArgs& args, Stream stream) { args.accumulate ? run<true>(args, stream) : run<false>(args, stream); }

}  // namespace npuzero::cuda
