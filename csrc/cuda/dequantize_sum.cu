// The contract is in ops/dequantize_sum.h. A thread adds up its elements rank by rank, and loads what two ranks sent
// before it uses the first of it.
#include "cuda/ops.h"
#include "cuda/wire.cuh"
#include "ops/dequantize_sum.h"

namespace npuzero::cuda {
namespace {

constexpr int ahead = 2;  // ranks

template <class Target, int bits, bool accumulate>
__global__ void __launch_bounds__(threads, 4)
    add_pieces(uint8_t* messages, typename Target::Bits* outs, int64_t ranks, Pieces pieces, bool in_accesses) {
  constexpr int count = block_rows<bits>;
  const int64_t of_rank = pieces.count * pieces.bytes;
  for_chunks(pieces, [&](uint32_t piece, Span start, bool inside) {
    const bool whole = in_accesses && inside;
    auto* out = outs + piece * pieces.numel;
    Group<float> sums[rows] = {};
    uint8_t* sent = messages + piece * pieces.bytes;
    for (int64_t left = ranks; left > 0; left -= ahead, sent += ahead * of_rank) {
      Codes<bits> codes[ahead][rows];
      uint16_t scales[ahead][rows];
#pragma unroll
      for (int r = 0; r < ahead; ++r) {
        const Message<bits> message(sent + r * of_rank, pieces.numel, start);
#pragma unroll
        for (int u = 0; u < rows; ++u) {
          const bool has = r < left && in_warp_row(start, u).has(0);
          codes[r][u] = has ? __ldcs(message.codes + u * warp) : 0;
          scales[r][u] = has ? message.scales[u / count] : 0;
        }
      }
#pragma unroll
      for (int r = 0; r < ahead; ++r) {
        if (r >= left) break;
#pragma unroll
        for (int u = 0; u < rows; ++u) {
          const Group<float> code = numbers<bits>(codes[r][u]);
          const float scale = BF16::widen(scales[r][u]);
#pragma unroll
          for (int k = 0; k < group; ++k) sums[u].at[k] += code.at[k] * scale;
        }
      }
    }
    if constexpr (accumulate) {
      Group<typename Target::Bits> values[rows];
      with_access(whole, [&](auto access) {
#pragma unroll
        for (int u = 0; u < rows; ++u) values[u] = load<access.value>(out, in_warp_row(start, u));
      });
#pragma unroll
      for (int u = 0; u < rows; ++u) {
        const Group<float> before = widened<Target>(values[u]);
#pragma unroll
        for (int k = 0; k < group; ++k) sums[u].at[k] = before.at[k] + sums[u].at[k];
      }
    }
    with_access(whole, [&](auto access) {
#pragma unroll
      for (int u = 0; u < rows; ++u) store<access.value>(out, in_warp_row(start, u), rounded<Target>(sums[u]));
    });
  });
}

template <class Target, int bits, bool accumulate>
void run(const DequantizeSumArgs& args, Stream stream) {
  const Pieces pieces(args.out.count, args.pieces, bits);
  auto* messages = static_cast<uint8_t*>(args.messages.data);
  auto* out = static_cast<typename Target::Bits*>(args.out.data);
  launch_over<add_pieces<Target, bits, accumulate>>(DequantizeSumArgs::op, pieces.chunks(), stream, messages, out,
                                                    args.rows, pieces, accessible(out));
}

template <class Target, int bits>
void run(const DequantizeSumArgs& args, Stream stream) {
  args.accumulate ? run<Target, bits, true>(args, stream) : run<Target, bits, false>(args, stream);
}

}  // namespace

void dequantize_sum(const DequantizeSumArgs& args, Stream stream) {
  if (args.out.count == 0) return;
  with_float(args.out.dtype, [&](auto type) {
    using Target = decltype(type);
    args.bits == 8 ? run<Target, 8>(args, stream) : run<Target, 4>(args, stream);
  });
}

}  // namespace npuzero::cuda
