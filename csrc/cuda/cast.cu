// The contract is in ops/cast.h. To nearest it is pack of one part, by the same contract.
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "cuda/random.cuh"
#include "ops/cast.h"

namespace npuzero::cuda {
namespace {

// The other roundings, of a group from element `begin` on.
struct Tf32 {
  using Bits = float;
  __device__ Group<float> operator()(const Group<float>& x, int64_t) const {
    Group<float> y;
#pragma unroll
    for (int k = 0; k < group; ++k) y.at[k] = round_tf32(x.at[k]);
    return y;
  }
};

struct Away {
  using Bits = uint16_t;
  __device__ Group<uint16_t> operator()(const Group<float>& x, int64_t) const { return rounded<UpperHalf>(x); }
};

struct Stochastic {
  using Bits = uint16_t;
  uint64_t seed, offset;
  __device__ Group<uint16_t> operator()(const Group<float>& x, int64_t begin) const {
    return rounded(x, Draws(offset + begin, 0, 0, seed));
  }
};

// May be in place: a thread has read what it writes.
template <class Rounding>
__global__ void __launch_bounds__(threads)
    round_all(const float* source, typename Rounding::Bits* target, int64_t n, Rounding rounding) {
  for (int64_t begin = blockIdx.x * chunk + threadIdx.x * group; begin < n; begin += gridDim.x * chunk) {
    Group<float> in[in_flight];
#pragma unroll
    for (int u = 0; u < in_flight; ++u) in[u] = load(source, Span{begin + u * stride, n});
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      store(target, Span{begin + u * stride, n}, rounding(in[u], begin + u * stride));
    }
  }
}

template <class Rounding>
void run(const CastArgs& args, Rounding rounding, Stream stream) {
  launch(CastArgs::op, round_all<Rounding>, grid_for((args.source.count + chunk - 1) / chunk), threads, stream,
         static_cast<const float*>(args.source.data), static_cast<typename Rounding::Bits*>(args.target.data),
         args.source.count, rounding);
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
