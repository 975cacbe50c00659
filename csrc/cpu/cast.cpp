// The contract is in ops/cast.h.
#include "ops/cast.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

constexpr int64_t draw = 8;  // elements that one Philox block serves, 16 bits each
constexpr int64_t blocks = tile / draw + 1;

// Philox4x32-10 of the counters first, first + 1, ...: their four words one after the other.
void philox(uint64_t first, uint64_t seed, uint32_t* __restrict words) {
#pragma omp simd
  for (int64_t i = 0; i < blocks; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
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
    words[4 * i] = c0;
    words[4 * i + 1] = c1;
    words[4 * i + 2] = c2;
    words[4 * i + 3] = c3;
  }
}

// `place`: that of source[0] in the whole; n is at most a tile.
void stochastic(const float* __restrict source, uint16_t* __restrict target, int64_t n, uint64_t seed, uint64_t place) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a word comes first");
  uint32_t words[4 * blocks];
  uint16_t halves[draw * blocks];
  philox(place / draw, seed, words);
  std::memcpy(halves, words, sizeof halves);
  const uint16_t* __restrict random = halves + place % draw;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(source[i]);
    const uint32_t neighbour = (u + random[i]) >> 16;
    const bool special = (u & 0x7f800000u) == 0x7f800000u;
    target[i] = special ? BF16::round(source[i]) : static_cast<uint16_t>(neighbour);
  }
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
    case Rounding::tf32:
      return each<F32, F32>(args, [](const float* in, float* out, int64_t n, int64_t) { tf32(in, out, n); });
    case Rounding::stochastic:
      return each<F32, BF16>(args, [&](const float* in, uint16_t* out, int64_t n, int64_t first) {
        stochastic(in, out, n, args.seed, args.offset + static_cast<uint64_t>(first));
      });
  }
}

}  // namespace npuzero::cpu::NPUZERO_ISA
