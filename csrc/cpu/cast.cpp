// The contract is in ops/cast.h.
#include "ops/cast.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "cpu/random.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

// n is at most a tile.
void stochastic(const float* __restrict source, uint16_t* __restrict target, int64_t n,
                const uint16_t* __restrict random) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) target[i] = round_stochastic(source[i], random[i]);
}

// May be in place: source and target are then the same pointer, which no iteration order can break.
void tf32(const float* source, float* target, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) target[i] = round_tf32(source[i]);
}

template <class Source, class Target, class Round>
void each(const CastArgs& args, const Round& round) {
  using Bits = typename Target::Bits;
  const auto* source = static_cast<const typename Source::Bits*>(args.source.data);
  auto* target = static_cast<Bits*>(args.target.data);
  const int64_t n = args.source.count;
  const bool streaming = args.source.data != args.target.data && n * itemsize(args.target.dtype) >= stream_bytes;
  for_flat(n, [&](int64_t begin, int64_t end) {
    write(target + begin, end - begin, streaming,
          [&](Bits* out, int64_t first, int64_t count) { round(source + begin + first, out, count, begin + first); });
  });
}

void nearest(const CastArgs& args) {
  with_float(args.source.dtype, [&](auto source) {
    with_float(args.target.dtype, [&](auto target) {
      using Source = decltype(source);
      using Target = decltype(target);
      each<Source, Target>(args,
                           [](const auto* in, auto* out, int64_t n, int64_t) { convert<Source, Target>(in, out, n); });
    });
  });
}

}  // namespace

void cast(const CastArgs& args, Stream) {
  switch (args.rounding) {
    case Rounding::nearest: return nearest(args);
    case Rounding::away:
      return each<F32, BF16>(
          args, [](const float* in, uint16_t* out, int64_t n, int64_t) { convert<F32, UpperHalf>(in, out, n); });
    case Rounding::tf32:
      return each<F32, F32>(args, [](const float* in, float* out, int64_t n, int64_t) { tf32(in, out, n); });
    case Rounding::stochastic:
      return each<F32, BF16>(args, [&](const float* in, uint16_t* out, int64_t n, int64_t first) {
        alignas(cache_line) uint16_t draws[tile];
        Draws{args.seed, 0, 0}.make(args.offset + static_cast<uint64_t>(first), draws, n);
        stochastic(in, out, n, draws);
      });
  }
}

}  // namespace npuzero::cpu::NPUZERO_ISA
