// The contract is in ops/cast.h.
#include "ops/cast.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

// Word 0 of Philox4x32-10.
inline uint32_t philox(uint64_t index, uint64_t seed) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

void stochastic(const float* __restrict source, uint16_t* __restrict target, int64_t begin, int64_t end, uint64_t seed,
                uint64_t offset) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t u = bits_of(source[i]);
    const uint32_t neighbour = (u + (philox(offset + static_cast<uint64_t>(i), seed) & 0xffffu)) >> 16;
    const bool special = (u & 0x7f800000u) == 0x7f800000u;
    target[i] = special ? BF16::round(source[i]) : static_cast<uint16_t>(neighbour);
  }
}

// May be in place: source and target are then the same pointer, which no iteration order can break.
void tf32(const float* source, float* target, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) target[i] = round_tf32(source[i]);
}

void nearest(const View& source, const View& target, int64_t begin, int64_t end) {
  with_float(source.dtype, [&](auto from) {
    with_float(target.dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      convert<From, To>(static_cast<const typename From::Bits*>(source.data) + begin,
                        static_cast<typename To::Bits*>(target.data) + begin, end - begin);
    });
  });
}

}  // namespace

void cast(const CastArgs& args, Stream) {
  for_flat(args.source.count, [&](int64_t begin, int64_t end) {
    const auto* source = static_cast<const float*>(args.source.data);
    switch (args.rounding) {
      case Rounding::nearest: return nearest(args.source, args.target, begin, end);
      case Rounding::tf32: return tf32(source, static_cast<float*>(args.target.data), begin, end);
      case Rounding::stochastic:
        return stochastic(source, static_cast<uint16_t*>(args.target.data), begin, end, args.seed, args.offset);
    }
  });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
