// The contract is in ops/quantize.h. The threads of a warp have a block's elements, and find the largest together.
#include "cuda/ops.h"
#include "cuda/wire.cuh"
#include "ops/quantize.h"

namespace npuzero::cuda {
namespace {

constexpr uint32_t infinity = 0x7f800000u;
constexpr uint16_t lost = 0x7fc0;

// Rounds a block of which this thread has `count` groups, and returns its scale; x becomes what rounding lost. All
// threads of a warp come here, whether they have elements or not.
template <int bits, int count>
__device__ uint16_t round_block(Group<float>* x, Codes<bits>* codes) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const uint32_t absolute = bits_of(x[i].at[k]) & 0x7fffffffu;
      largest = absolute > largest ? absolute : largest;
    }
  }
#pragma unroll
  for (int apart = warp / 2; apart > 0; apart /= 2) {
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, largest, apart, warp);
    largest = theirs > largest ? theirs : largest;
  }
  const bool finite = largest < infinity;
  const float needed = finite ? float_of(largest) * (1.0f / wire_largest(bits)) : 0.0f;
  const auto scale = static_cast<uint16_t>((bits_of(needed > 0x1p-120f ? needed : 0x1p-120f) + 0xffffu) >> 16);
  const float unit = BF16::widen(scale), inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    uint32_t found[group];
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const float value = finite ? x[i].at[k] : 0.0f;
      const Nearest code(value * inverse);
      found[k] = code.code();
      x[i].at[k] = value - code.value() * unit;
    }
    codes[i] = joined<bits>(found);
  }
  return finite ? scale : lost;
}

template <class Source, int bits, bool with_residual>
__global__ void __launch_bounds__(threads, 4) quantize_pieces(const typename Source::Bits* sources, uint8_t* messages,
                                                              float* residuals, Pieces pieces, bool in_accesses) {
  constexpr int count = block_rows<bits>;
  for_chunks(pieces, [&](uint32_t piece, Span start, bool inside) {
    const bool whole = in_accesses && inside;
    const auto* source = sources + piece * pieces.numel;
    float* residual = with_residual ? residuals + piece * pieces.numel : nullptr;
    const Message<bits> message(messages + piece * pieces.bytes, pieces.numel, start);
    Group<typename Source::Bits> values[rows];
    Group<float> x[rows];
    with_access(whole, [&](auto access) {
#pragma unroll
      for (int u = 0; u < rows; ++u) {
        values[u] = load<access.value>(source, in_warp_row(start, u));
        if constexpr (with_residual) x[u] = load<access.value>(residual, in_warp_row(start, u));
      }
    });
#pragma unroll
    for (int u = 0; u < rows; ++u) {
      const Group<float> wide = widened<Source>(values[u]);
#pragma unroll
      for (int k = 0; k < group; ++k) x[u].at[k] = with_residual ? wide.at[k] + x[u].at[k] : wide.at[k];
    }
    Codes<bits> codes[rows];
    uint16_t scale[rows / count];
#pragma unroll
    for (int b = 0; b < rows / count; ++b) scale[b] = round_block<bits, count>(x + b * count, codes + b * count);
#pragma unroll
    for (int u = 0; u < rows; ++u) {
      const bool has = in_warp_row(start, u).has(0);
      if (has) message.codes[u * warp] = codes[u];
      if (has && u % count == 0 && threadIdx.x % warp == 0) message.scales[u / count] = scale[u / count];
    }
    if constexpr (with_residual) {
      with_access(whole, [&](auto access) {
#pragma unroll
        for (int u = 0; u < rows; ++u) store<access.value, Reuse::late>(residual, in_warp_row(start, u), x[u]);
      });
    }
  });
}

template <class Source, int bits>
void run(const QuantizeArgs& args, Stream stream) {
  const Pieces pieces(args.source.count, args.pieces, bits);
  const auto* source = static_cast<const typename Source::Bits*>(args.source.data);
  auto* message = static_cast<uint8_t*>(args.message.data);
  const auto with = [&](auto residual) {
    launch_over<quantize_pieces<Source, bits, residual.value>>(QuantizeArgs::op, pieces.chunks(), stream, source,
                                                               message, args.residual, pieces,
                                                               accessible(source) && accessible(args.residual));
  };
  args.residual ? with(std::true_type{}) : with(std::false_type{});
}

}  // namespace

void quantize(const QuantizeArgs& args, Stream stream) {
  if (args.source.count == 0) return;
  with_float(args.source.dtype, [&](auto type) {
    using Source = decltype(type);
    args.bits == 8 ? run<Source, 8>(args, stream) : run<Source, 4>(args, stream);
  });
}

}  // namespace npuzero::cuda
