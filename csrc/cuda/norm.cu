// The contract is in ops/norm.h, and so is the order of the sum: eight threads have the 32 lanes of a block of
// elements, four each. What the 256 threads of a block do is a node of the tree over all blocks of elements; one more
// block of threads adds these nodes.
#include <cmath>

#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "ops/norm.h"

namespace npuzero::cuda {
namespace {

constexpr int lanes = 32;
constexpr int block_threads = lanes / group;
constexpr int warps = threads / warp;
constexpr int64_t blocks_at_a_time = threads / block_threads;

struct Partial {
  double sum, bad;

  __device__ void add(const Partial& other) {
    sum += other.sum;
    bad += other.bad;
  }
};

// Another thread's of the warp.
__device__ Partial across(const Partial& mine, int apart) {
  return {__shfl_xor_sync(0xffffffffu, mine.sum, apart, warp), __shfl_xor_sync(0xffffffffu, mine.bad, apart, warp)};
}

template <class Source>
__device__ void add_squares(double (&sums)[group], const Group<typename Source::Bits>& values) {
#pragma unroll
  for (int k = 0; k < group; ++k) {
    const double value = Source::widen(values.at[k]);
    sums[k] = fma(value, value, sums[k]);  // the square is exact, so this rounds once, as the addition does
  }
}

__device__ bool not_finite(float x) { return (bits_of(x) & 0x7f800000u) == 0x7f800000u; }

// What one thread adds of a block that begins at `begin`. Addend is void where there is none; else x is f32, and
// written. Past the end are zeros, which change no sum of squares.
template <bool whole, class Source, class Addend, class X, class A>
__device__ void add_block(double (&sums)[group], X* x, const A* addend, float scale, int64_t begin, int64_t n) {
  constexpr int ahead = std::is_void_v<Addend> ? 8 : 4;  // groups of each buffer that are loaded before one is used
  for (int64_t i = begin; i < begin + norm_block && i < n; i += lanes * ahead) {
    Group<typename Source::Bits> values[ahead];
    Group<A> addends[ahead];
#pragma unroll
    for (int u = 0; u < ahead; ++u) {
      const Span span{i + u * lanes, n};
      values[u] = load<whole>(x, span);
      if constexpr (!std::is_void_v<Addend>) addends[u] = load<whole>(addend, span);
    }
#pragma unroll
    for (int u = 0; u < ahead; ++u) {
      if constexpr (!std::is_void_v<Addend>) {
#pragma unroll
        for (int k = 0; k < group; ++k) {
          values[u].at[k] = values[u].at[k] + Addend::widen(addends[u].at[k]) * scale;
        }
        store<whole>(x, Span{i + u * lanes, n}, values[u]);
      }
      add_squares<Source>(sums, values[u]);
    }
  }
}

template <class Source, class X>
__device__ double count_bad(const X* x, int64_t begin, int64_t n) {
  double bad = 0;
  for (int64_t i = begin; i < begin + norm_block; i += lanes) {
    for (int k = 0; k < group; ++k) bad += i + k < n && not_finite(Source::widen(x[i + k]));
  }
  return bad;
}

template <class Source, class Addend, class X, class A>
__global__ void __launch_bounds__(threads)
    sum_blocks(X* x, const A* addend, float scale, int64_t n, bool in_accesses, Partial* nodes) {
  const int64_t block = blockIdx.x * blocks_at_a_time + threadIdx.x / block_threads;
  const int64_t begin = block * norm_block + threadIdx.x % block_threads * group;
  double sums[group] = {};
  with_access(in_accesses && (block + 1) * norm_block <= n,
              [&](auto access) { add_block<access.value, Source, Addend>(sums, x, addend, scale, begin, n); });
#pragma unroll
  for (int apart = block_threads / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int k = 0; k < group; ++k) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], apart, warp);
  }
#pragma unroll
  for (int apart = group / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int k = 0; k < apart; ++k) sums[k] += sums[k + apart];
  }
  // No square of a finite f32 overflows, nor does a sum of 2^63 of them: where it is finite, so is every element.
  Partial node = {sums[0], std::isfinite(sums[0]) ? 0.0 : count_bad<Source>(x, begin, n)};
#pragma unroll
  for (int apart = 1; apart < block_threads; apart *= 2) {
    node.bad += __shfl_xor_sync(0xffffffffu, node.bad, apart, warp);
  }
#pragma unroll
  for (int apart = block_threads; apart < warp; apart *= 2) node.add(across(node, apart));
  __shared__ Partial of_warps[warps];
  if (threadIdx.x % warp == 0) of_warps[threadIdx.x / warp] = node;
  __syncthreads();
  if (threadIdx.x >= warp) return;
  node = of_warps[threadIdx.x % warps];
#pragma unroll
  for (int apart = 1; apart < warps; apart *= 2) node.add(across(node, apart));
  if (threadIdx.x == 0) nodes[blockIdx.x] = node;
}

// The tree over the nodes, in place, by one group of threads; each adds `side` of them at a time.
constexpr int side = 8, last_threads = 1024;

__global__ void __launch_bounds__(last_threads) sum_nodes(Partial* nodes, int64_t count, double* out) {
  for (int64_t apart = 1; apart < count; apart *= side) {
    for (int64_t first = threadIdx.x * side * apart; first < count; first += last_threads * side * apart) {
      Partial found[side];
#pragma unroll
      for (int k = 0; k < side; ++k) found[k] = first + k * apart < count ? nodes[first + k * apart] : Partial{0, 0};
#pragma unroll
      for (int near = 1; near < side; near *= 2) {
#pragma unroll
        for (int k = 0; k < side; k += 2 * near) found[k].add(found[k + near]);
      }
      nodes[first] = found[0];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) out[0] = count ? nodes[0].sum : 0, out[1] = count ? nodes[0].bad : 0;
}

}  // namespace

void norm(const NormArgs& args, Stream stream) {
  const int64_t n = args.x.count;
  const int64_t count = (norm_blocks(n) + blocks_at_a_time - 1) / blocks_at_a_time;
  auto* nodes = static_cast<Partial*>(args.workspace.data);
  if (n > 0) {
    with_float(args.addend ? args.addend->dtype : args.x.dtype, [&](auto type) {
      using Type = decltype(type);
      using Bits = typename Type::Bits;
      if (args.addend) {
        auto* x = static_cast<float*>(args.x.data);
        const auto* addend = static_cast<const Bits*>(args.addend->data);
        launch<sum_blocks<F32, Type, float, Bits>>(NormArgs::op, count, threads, stream, x, addend, args.scale, n,
                                                   accessible(x) && accessible(addend), nodes);
      } else {
        const auto* x = static_cast<const Bits*>(args.x.data);
        launch<sum_blocks<Type, void, const Bits, Bits>>(
            NormArgs::op, count, threads, stream, x, static_cast<const Bits*>(nullptr), 0.0f, n, accessible(x), nodes);
      }
    });
  }
  launch<sum_nodes>(NormArgs::op, 1, last_threads, stream, nodes, count, static_cast<double*>(args.out.data));
}

}  // namespace npuzero::cuda
