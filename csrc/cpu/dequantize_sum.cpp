// The contract is in ops/dequantize_sum.h.
#include "ops/dequantize_sum.h"

#include "cpu/convert.h"
#include "cpu/wire.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

// The values of a block, added to `sum` or put there.
void add_bytes(const uint8_t* __restrict codes, float scale, bool add, float* __restrict sum) {
  constexpr int64_t n = wire_block(8);
  const auto value = [=](int64_t i) { return static_cast<float>(static_cast<int8_t>(codes[i])) * scale; };
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + value(i);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = value(i);
  }
}

// The same of halves of bytes. A code stays in the upper half of its byte, 16 times as much, for which the scale makes
// up, exactly: so nothing is shifted back. Elements that share a byte stay apart, in a half of `sum` each, until all
// rows are added: putting them side by side would take a shuffle for every row.
void add_halves(const uint8_t* __restrict codes, float scale, bool add, float* __restrict sum) {
  constexpr int64_t n = wire_block(4) / 2;
  const float sixteenth = scale * 0.0625f;
  const auto first = [=](int64_t i) { return static_cast<float>(static_cast<int8_t>(codes[i] << 4)) * sixteenth; };
  const auto second = [=](int64_t i) { return static_cast<float>(static_cast<int8_t>(codes[i] & 0xf0)) * sixteenth; };
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = sum[i] + first(i);
      sum[n + i] = sum[n + i] + second(i);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = first(i);
      sum[n + i] = second(i);
    }
  }
}

void put_side_by_side(const float* __restrict apart, float* __restrict sum) {
  constexpr int64_t n = wire_block(4) / 2;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    sum[2 * i] = apart[i];
    sum[2 * i + 1] = apart[n + i];
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
    alignas(cache_line) float apart[wire_block(4)];
    for (int64_t at = 0; at < count; at += block) {
      for (int64_t row = 0; row < args.rows; ++row) {
        const Message<bits, const uint8_t> message(args.messages.data, row * args.pieces + piece, each);
        const uint8_t* codes = message.codes + code_bytes(i + at, bits);
        const float scale = BF16::widen(reinterpret_cast<const uint16_t*>(message.scales)[(i + at) / block]);
        bits == 8 ? add_bytes(codes, scale, row > 0, sum + at) : add_halves(codes, scale, row > 0, apart);
      }
      if (bits == 4) put_side_by_side(apart, sum + at);
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
