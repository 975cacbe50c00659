// The contract is in ops/quantize.h.
#include "ops/quantize.h"

#include "cpu/convert.h"
#include "cpu/wire.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

constexpr float least_scale = 0x1p-120f;
constexpr uint16_t lost = 0x7fc0;
// 1.5 * 2^23. What is small and added to it is rounded to an integer, ties to even, which stands in the lower bits.
constexpr float to_integer = 12582912.0f;

// The largest pattern of the magnitudes.
template <int64_t n>
int32_t largest_of(const float* __restrict x) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu));
  return largest;
}

// Two codes a byte, the first in the lower half; of two codes each, the first in the lower byte, as they lie in memory.
template <int64_t n>
void pack_halves(const uint16_t* __restrict codes, uint8_t* __restrict out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>((codes[i] & 0x0f) | (codes[i] >> 4 & 0xf0));
}

// One block; its scale. `x` is not `residual`.
template <int bits, bool with_residual>
uint16_t round_block(const float* __restrict x, uint8_t* __restrict out, float* __restrict residual) {
  constexpr int64_t n = wire_block(bits);
  constexpr float share = 1.0f / wire_largest(bits);
  const int32_t largest = largest_of<n>(x);
  if (largest >= 0x7f800000) {
    std::fill_n(out, code_bytes(n, bits), uint8_t{0});
    if (with_residual) std::fill_n(residual, n, 0.0f);
    return lost;
  }
  const float wanted = std::max(float_of(static_cast<uint32_t>(largest)) * share, least_scale);
  const auto upper = static_cast<uint16_t>((bits_of(wanted) + 0xffffu) >> 16);
  const float scale = BF16::widen(upper), inverse = 1.0f / scale;
  alignas(cache_line) uint16_t pairs[n / 2];
  auto* __restrict codes = reinterpret_cast<signed char*>(bits == 8 ? static_cast<void*>(out) : pairs);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float rounded = x[i] * inverse + to_integer;
    codes[i] = static_cast<signed char>(bits_of(rounded));
    if (with_residual) residual[i] = x[i] - (rounded - to_integer) * scale;
  }
  if (bits == 4) pack_halves<n / 2>(pairs, out);
  return upper;
}

// The source in f32, with its residual, which may be absent; where it is that already, it is read where it lies.
template <class Source>
const float* widen(const typename Source::Bits* source, const float* __restrict residual, float* __restrict x,
                   int64_t n) {
  if constexpr (std::is_same_v<Source, F32>) {
    if (residual == nullptr) return source;
  }
  if (residual == nullptr) {
    convert<Source, F32>(source, x, n);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = Source::widen(source[i]) + residual[i];
  }
  return x;
}

template <class Source, int bits>
void quantize(const QuantizeArgs& args) {
  constexpr int64_t block = wire_block(bits), block_bytes = code_bytes(block, bits);
  static_assert(block_bytes % cache_line == 0 && tile % block_bytes == 0);
  const int64_t n = args.source.count, each = n / args.pieces;
  const auto* source = static_cast<const typename Source::Bits*>(args.source.data);
  const bool streaming = code_bytes(n, bits) >= stream_bytes;
  for_pieces<bits>(n, args.pieces, [&](int64_t piece, int64_t begin, int64_t end) {
    const Message<bits, uint8_t> message(args.message.data, piece, each);
    auto* scales = reinterpret_cast<uint16_t*>(message.scales);
    write(message.codes + code_bytes(begin, bits), code_bytes(end - begin, bits), streaming,
          [&](uint8_t* out, int64_t first, int64_t count) {
            const int64_t at = begin + first / block_bytes * block, blocks = count / block_bytes;
            float* residual = args.residual ? args.residual + piece * each + at : nullptr;
            alignas(cache_line) float buffer[tile / block_bytes * block];
            const float* x = widen<Source>(source + piece * each + at, residual, buffer, blocks * block);
            for (int64_t i = 0; i < blocks; ++i) {
              uint8_t* codes = out + i * block_bytes;
              scales[at / block + i] = residual ? round_block<bits, true>(x + i * block, codes, residual + i * block)
                                                : round_block<bits, false>(x + i * block, codes, nullptr);
            }
          });
  });
}

}  // namespace

void quantize(const QuantizeArgs& args, Stream) {
  with_float(args.source.dtype, [&](auto source) {
    using Source = decltype(source);
    args.bits == 8 ? quantize<Source, 8>(args) : quantize<Source, 4>(args);
  });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
