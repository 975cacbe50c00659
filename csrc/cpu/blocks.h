// The 8-bit moments of core/flat.h, block by block.
#pragma once

#include <algorithm>

#include "core/codes.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// A block's codes in f32.
template <bool with_sign>
inline void widen_block(const uint8_t* __restrict codes, uint8_t exponent, float* __restrict out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = Code<with_sign>::widen(codes[i], exponent);
}

// The codes of a block, and its exponent. `add(i)` is what Code's rounding adds to element i.
template <bool with_sign, class Add>
inline uint8_t round_block(const float* __restrict in, uint8_t* __restrict codes, int64_t n, const Add& add) {
  using Code = Code<with_sign>;
  int32_t largest = 0;  // of the patterns without their sign
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<int32_t>(bits_of(in[i]) & 0x7fffffffu));
  const uint32_t exponent = Code::exponent_of(static_cast<uint32_t>(largest));
  if (exponent == Code::not_finite) {
    std::fill_n(codes, n, uint8_t{0});
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) codes[i] = Code::round(in[i], exponent, add(i));
  }
  return static_cast<uint8_t>(exponent);
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
