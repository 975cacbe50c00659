// One element of the 8-bit moments of core/flat.h, whose block has an exponent. Integers only.
#pragma once

#include "core/numeric.h"

namespace npuzero {
inline namespace NPUZERO_ISA {

// Codes with a sign have one exponent bit less.
template <bool with_sign>
struct Code {
  static constexpr int dropped = 19;  // bits of f32's mantissa: four are kept
  static constexpr uint32_t magnitude = with_sign ? 0x7f : 0xff;
  static constexpr uint32_t span = magnitude >> 4;  // from the largest exponent to the smallest
  static constexpr uint32_t least_exponent = 16, not_finite = 255;

  NPUZERO_INLINE static float widen(uint8_t code, uint32_t exponent) {
    const uint32_t kept = code & magnitude, sign = (code & ~magnitude) << 24;
    const uint32_t all = exponent == not_finite ? 0x7fc00000u : 0u;
    return float_of((kept ? (kept + ((exponent - span) << 4)) << dropped : 0u) | sign | all);
  }

  // The exponent of a block: `largest` is the largest pattern of its elements without their sign.
  NPUZERO_INLINE static uint32_t exponent_of(uint32_t largest) {
    const uint32_t exponent = (largest + ((1u << dropped) - 1)) >> 23;
    return exponent < least_exponent ? least_exponent : (exponent > not_finite ? not_finite : exponent);
  }

  // `add` is what is added below a code's last bit before the rest is cut. Not of a block that is not finite.
  NPUZERO_INLINE static uint8_t round(float x, uint32_t exponent, uint32_t add) {
    const uint32_t u = bits_of(x), absolute = u & 0x7fffffffu;
    const int32_t nearby =
        static_cast<int32_t>((absolute + add) >> dropped) - static_cast<int32_t>((exponent - span) << 4);
    const uint32_t least = with_sign ? (exponent - span - 1) << 23 : 1u;  // smaller ones are zero
    const uint32_t code = absolute < least ? 0u : static_cast<uint32_t>(nearby < 1 ? 1 : nearby);
    return static_cast<uint8_t>(code | ((u >> 24) & ~magnitude & 0xffu));
  }
};

}  // namespace NPUZERO_ISA
}  // namespace npuzero
