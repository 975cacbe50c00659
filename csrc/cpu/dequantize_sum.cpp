// The contract is in ops/dequantize_sum.h.
#include "ops/dequantize_sum.h"

#include "cpu/convert.h"
#include "cpu/wire.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

// The codes of halves, sign-extended: two for each byte, the lower first.
template <int64_t n>
void unpack_halves(const uint8_t* __restrict packed, int8_t* __restrict codes) {
#pragma omp simd
  for (int64_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = static_cast<int8_t>(((packed[i] & 15) ^ 8) - 8);
    codes[2 * i + 1] = static_cast<int8_t>(((packed[i] >> 4) ^ 8) - 8);
  }
}

// The values of a block, added to `sum` or put there.
template <int bits>
void add_block(const uint8_t* __restrict packed, float scale, bool add, float* __restrict sum) {
  constexpr int64_t n = wire_block(bits);
  alignas(cache_line) int8_t halves[n];
  if (bits == 4) unpack_halves<n>(packed, halves);
  const auto* __restrict codes = bits == 8 ? reinterpret_cast<const int8_t*>(packed) : halves;
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + static_cast<float>(codes[i]) * scale;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<float>(codes[i]) * scale;
  }
}

template <class Target, int bits>
void dequantize_sum(const DequantizeSumArgs& args) {
  using Bits = typename Target::Bits;
  constexpr int64_t block = wire_block(bits);
  static_assert(tile % block == 0);
  const int64_t n = args.out.count, each = n / args.pieces;
  auto* target = static_cast<Bits*>(args.out.data);
  // Sums of whole blocks, at most a tile of them, from element i of a piece on.
  const auto sum_blocks = [&](int64_t piece, int64_t i, int64_t count, float* sum) {
    for (int64_t row = 0; row < args.rows; ++row) {
      const Message<bits, const uint8_t> message(args.messages.data, row * args.pieces + piece, each);
      const auto* scales = reinterpret_cast<const uint16_t*>(message.scales);
      for (int64_t at = 0; at < count; at += block) {
        add_block<bits>(message.codes + code_bytes(i + at, bits), BF16::widen(scales[(i + at) / block]), row > 0,
                        sum + at);
      }
    }
  };
  const bool aligned = reinterpret_cast<uintptr_t>(target) % cache_line == 0;  // so that tiles are whole blocks
  const bool streaming = !args.accumulate && aligned && n * itemsize(args.out.dtype) >= stream_bytes;
  for_pieces<bits>(n, args.pieces, [&](int64_t piece, int64_t begin, int64_t end) {
    write(target + piece * each + begin, end - begin, streaming, [&](Bits* out, int64_t first, int64_t count) {
      if constexpr (std::is_same_v<Target, F32>) {
        if (!args.accumulate) return sum_blocks(piece, begin + first, count, out);
      }
      alignas(cache_line) float sum[tile];
      sum_blocks(piece, begin + first, count, sum);
      if (args.accumulate) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = Target::round(Target::widen(out[i]) + sum[i]);
      } else {
        convert<F32, Target>(sum, out, count);
      }
    });
  });
}

}  // namespace

void dequantize_sum(const DequantizeSumArgs& args, Stream) {
  with_float(args.out.dtype, [&](auto target) {
    using Target = decltype(target);
    args.bits == 8 ? dequantize_sum<Target, 8>(args) : dequantize_sum<Target, 4>(args);
  });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
