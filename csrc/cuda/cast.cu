// The contract is in ops/cast.h. To nearest it is pack of one part, by the same contract.
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "cuda/random.cuh"
#include "ops/cast.h"

namespace npuzero::cuda {
namespace {

// The other roundings, of a thread's groups in a chunk, the first of them from element `first` on. `prepare` is called
// once before.
struct Tf32 {
  using Bits = float;
  __device__ void prepare() {}
  __device__ void operator()(const Group<float> (&x)[rows], Group<Bits> (&y)[rows], int64_t) const {
#pragma unroll
    for (int u = 0; u < rows; ++u) {
#pragma unroll
      for (int k = 0; k < group; ++k) y[u].at[k] = round_tf32(x[u].at[k]);
    }
  }
};

struct Away {
  using Bits = uint16_t;
  __device__ void prepare() {}
  __device__ void operator()(const Group<float> (&x)[rows], Group<Bits> (&y)[rows], int64_t) const {
#pragma unroll
    for (int u = 0; u < rows; ++u) y[u] = rounded<UpperHalf>(x[u]);
  }
};

struct Stochastic {
  using Bits = uint16_t;
  uint64_t seed, offset;
  const uint32_t* columns = nullptr;
  __device__ void prepare() { columns = shared_columns(seed); }
  __device__ void operator()(const Group<float> (&x)[rows], Group<Bits> (&y)[rows], int64_t first) const {
    const int at = static_cast<int>(first % chunk);
    const Drawing draw(columns, offset + first - at, 0, 0, seed);
#pragma unroll
    for (int u = 0; u < rows; ++u) y[u] = rounded(x[u], draw(at + u * row));
  }
};

// May be in place: a thread has read what it writes.
template <class Rounding>
__global__ void __launch_bounds__(threads)
    round_all(const float* source, typename Rounding::Bits* target, int64_t n, bool accessible, Rounding rounding) {
  rounding.prepare();
  for (int64_t begin = blockIdx.x * chunk; begin < n; begin += gridDim.x * chunk) {
    const bool whole = accessible && begin + chunk <= n;
    const int64_t first = begin + threadIdx.x * group;
    Group<float> x[rows];
    Group<typename Rounding::Bits> y[rows];
    with_access(whole, [&](auto access) {
#pragma unroll
      for (int u = 0; u < rows; ++u) x[u] = load<access.value>(source, Span{first + u * row, n});
    });
    rounding(x, y, first);
    with_access(whole, [&](auto access) {
#pragma unroll
      for (int u = 0; u < rows; ++u) store<access.value>(target, Span{first + u * row, n}, y[u]);
    });
  }
}

template <class Rounding>
void run(const CastArgs& args, Rounding rounding, Stream stream) {
  const auto* source = static_cast<const float*>(args.source.data);
  auto* target = static_cast<typename Rounding::Bits*>(args.target.data);
  launch_over<round_all<Rounding>>(CastArgs::op, chunks_of(args.source.count), stream, source, target,
                                   args.source.count, accessible(source) && accessible(target), rounding);
}

}  // namespace

void cast(const CastArgs& args, Stream stream) {
  if (args.source.count == 0) return;
  switch (args.rounding) {
    case Rounding::nearest: {
      const PackPart part{args.source.data,  args.target.data, args.source.count, 0,
                          args.source.dtype, args.target.dtype};
      return pack(PackArgs{&part, 1, args.source.count, 1.0f, nullptr, false, false}, stream);
    }
    case Rounding::tf32: return run(args, Tf32{}, stream);
    case Rounding::away: return run(args, Away{}, stream);
    case Rounding::stochastic: return run(args, Stochastic{args.seed, args.offset}, stream);
  }
}

}  // namespace npuzero::cuda
