// The 8-bit moments of ops/flat_adam.h: blocks of codes with one exponent each. Integers only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/numeric.h"
#include "ops/flat_adam.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// Codes with a sign have one exponent bit less.
template <bool with_sign>
struct Code {
  static constexpr int dropped = 19;  // bits of f32's mantissa: four are kept
  static constexpr uint32_t magnitude = with_sign ? 0x7f : 0xff;
  static constexpr uint32_t span = magnitude >> 4;  // from the largest exponent to the smallest
  static constexpr uint32_t least_exponent = 16, not_finite = 255;

  // A block's codes in f32.
  static void widen(const uint8_t* __restrict codes, uint8_t exponent, float* __restrict out, int64_t n) {
    const uint32_t bias = (exponent - span) << 4;
    const uint32_t all = exponent == not_finite ? 0x7fc00000u : 0u;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t code = codes[i] & magnitude;
      const uint32_t sign = (codes[i] & ~magnitude) << 24;
      out[i] = float_of((code ? (code + bias) << dropped : 0u) | sign | all);
    }
  }

  // The codes of a block, and its exponent. `add(i)` is what is added below a code's last bit before the rest is cut.
  template <class Add>
  static uint8_t round(const float* __restrict in, uint8_t* __restrict codes, int64_t n, const Add& add) {
    int32_t largest = 0;  // of the patterns without their sign
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<int32_t>(bits_of(in[i]) & 0x7fffffffu));
    constexpr uint32_t ones = (1u << dropped) - 1;
    const uint32_t exponent = std::max((static_cast<uint32_t>(largest) + ones) >> 23, least_exponent);
    if (exponent >= not_finite) {
      std::fill_n(codes, n, uint8_t{0});
      return not_finite;
    }
    const int32_t bias = static_cast<int32_t>((exponent - span) << 4);
    const uint32_t least = with_sign ? (exponent - span - 1) << 23 : 1u;  // smaller ones are zero
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t u = bits_of(in[i]), absolute = u & 0x7fffffffu;
      const int32_t nearby = static_cast<int32_t>((absolute + add(i)) >> dropped) - bias;
      const uint32_t code = absolute < least ? 0u : static_cast<uint32_t>(nearby < 1 ? 1 : nearby);
      codes[i] = static_cast<uint8_t>(code | ((u >> 24) & ~magnitude & 0xffu));
    }
    return static_cast<uint8_t>(exponent);
  }
};

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
