// The contract is in ops/norm.h, and so is the order of the sum: sixteen threads are the sixteen lanes of a block of
// elements, so a warp does two blocks; then one warp adds what the blocks gave, in their order.
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "ops/norm.h"

namespace npuzero::cuda {
namespace {

constexpr int lanes = 16, warp = 32;
constexpr int64_t blocks_at_a_time = threads / lanes;
constexpr int ahead = 8;  // elements that a lane has loaded before it adds the first

struct Partial {
  double sum, bad;
};

__device__ inline bool not_finite(float x) { return (bits_of(x) & 0x7f800000u) == 0x7f800000u; }

// Addend is void where there is none; else x is f32, and written.
template <class Type, class Addend, class X, class A>
__global__ void __launch_bounds__(threads)
    sum_blocks(X* x, const A* addend, float scale, int64_t n, Partial* partials) {
  const int lane = threadIdx.x % lanes;
  const int64_t blocks = norm_blocks(n);
  // Every thread of a warp goes round equally often, since they exchange their sums.
  for (int64_t first = blockIdx.x * blocks_at_a_time; first < blocks; first += gridDim.x * blocks_at_a_time) {
    const int64_t block = first + threadIdx.x / lanes;
    const int64_t begin = block * norm_block, end = std::min(begin + norm_block, n);
    double sum = 0;
    int bad = 0;
    for (int64_t i = begin + lane; i < end; i += lanes * ahead) {
      float values[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k) values[k] = i + k * lanes < end ? Type::widen(x[i + k * lanes]) : 0.0f;
      if constexpr (!std::is_void_v<Addend>) {
#pragma unroll
        for (int k = 0; k < ahead; ++k) {
          if (i + k * lanes < end) {
            values[k] = values[k] + Addend::widen(addend[i + k * lanes]) * scale;
            x[i + k * lanes] = values[k];
          }
        }
      }
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        const double value = values[k];
        sum += value * value;  // past the end it adds zero, which changes no sum of squares
        bad += not_finite(values[k]);
      }
    }
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, apart, lanes);
      bad += __shfl_xor_sync(0xffffffffu, bad, apart, lanes);
    }
    if (lane == 0 && block < blocks) partials[block] = {sum, static_cast<double>(bad)};
  }
}

// One warp: loads as many partials as it has threads, and adds them in their order.
__global__ void __launch_bounds__(warp) sum_partials(const Partial* partials, int64_t blocks, double* out) {
  double sum = 0, bad = 0;
  for (int64_t first = 0; first < blocks; first += warp) {
    const int64_t mine = first + threadIdx.x;
    const Partial partial = mine < blocks ? partials[mine] : Partial{0, 0};
#pragma unroll
    for (int k = 0; k < warp; ++k) {
      sum += __shfl_sync(0xffffffffu, partial.sum, k);
      bad += __shfl_sync(0xffffffffu, partial.bad, k);
    }
  }
  if (threadIdx.x == 0) out[0] = sum, out[1] = bad;
}

}  // namespace

void norm(const NormArgs& args, Stream stream) {
  const int64_t n = args.x.count, blocks = norm_blocks(n);
  auto* partials = static_cast<Partial*>(args.workspace.data);
  const int64_t grid = grid_for((blocks + blocks_at_a_time - 1) / blocks_at_a_time);
  if (n > 0) {
    with_float(args.addend ? args.addend->dtype : args.x.dtype, [&](auto type) {
      using Type = decltype(type);
      using Bits = typename Type::Bits;
      if (args.addend) {
        launch(NormArgs::op, sum_blocks<F32, Type, float, Bits>, grid, threads, stream,
               static_cast<float*>(args.x.data), static_cast<const Bits*>(args.addend->data), args.scale, n, partials);
      } else {
        launch(NormArgs::op, sum_blocks<Type, void, const Bits, Bits>, grid, threads, stream,
               static_cast<const Bits*>(args.x.data), static_cast<const Bits*>(nullptr), 0.0f, n, partials);
      }
    });
  }
  launch(NormArgs::op, sum_partials, 1, warp, stream, partials, blocks, static_cast<double*>(args.out.data));
}

}  // namespace npuzero::cuda
