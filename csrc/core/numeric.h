// The element types as structs with the same two functions, and TF32 rounding. Integers and selects only, so that
// loops over them vectorise on every instruction set and denormals survive whatever the caller's flush mode is.
//
// Rounding to bf16 and f16 is to nearest, ties to even; beyond the largest finite value it is infinity. NaN stays NaN
// (quiet, its payload cut off); infinity stays infinity. Widening to f32 is exact, a signalling NaN aside.
//
// All of it lives in a namespace named after the instruction set: the same inline function compiled twice with
// different flags must not be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/inline.h"
#include "core/view.h"

#ifndef NPUZERO_ISA
#define NPUZERO_ISA baseline
#endif

namespace npuzero {
inline namespace NPUZERO_ISA {

NPUZERO_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

NPUZERO_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

struct F32 {
  using Bits = float;
  NPUZERO_INLINE static float widen(float x) { return x; }
  NPUZERO_INLINE static float round(float x) { return x; }
};

struct BF16 {
  using Bits = uint16_t;
  NPUZERO_INLINE static float widen(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
  NPUZERO_INLINE static uint16_t round(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40u;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : nearest);
  }
};

// bf16 whose ties go away from zero: the upper half of an f32 that is split into it and a signed remainder of 16 bits,
// f32's bits = (bf16's bits << 16) + remainder. (Ties to even would leave remainders of both signs at a tie.)
struct UpperHalf {
  using Bits = uint16_t;
  NPUZERO_INLINE static float widen(uint16_t h) { return BF16::widen(h); }
  NPUZERO_INLINE static uint16_t round(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t nan = (u >> 16) | 0x40u;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : (u + 0x8000u) >> 16);
  }
  NPUZERO_INLINE static int16_t remainder(float x) {
    const uint32_t u = bits_of(x);
    return static_cast<int16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0u : u);
  }
  NPUZERO_INLINE static float join(uint16_t upper, int16_t remainder) {
    return float_of((static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
  }
};

struct F16 {
  using Bits = uint16_t;
  NPUZERO_INLINE static float widen(uint16_t h) {
    const uint32_t sign = (static_cast<uint32_t>(h) & 0x8000u) << 16;
    const uint32_t magnitude = (static_cast<uint32_t>(h) & 0x7fffu) << 13;
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23);
    // A denormal is mantissa * 2^-24: set the mantissa below 2^-14 and take 2^-14 away again, exactly.
    const uint32_t denormal = bits_of(float_of(magnitude + 0x38800000u) - float_of(0x38800000u));
    const uint32_t finite = magnitude < (1u << 23) ? denormal : normal;
    return float_of(sign | (magnitude >= (31u << 23) ? special : finite));
  }
  NPUZERO_INLINE static uint16_t round(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Below 2^-14 the result's unit is 2^-24, that of f32 in [0.5, 1): let the adder round.
    const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    const uint32_t bounded = magnitude >= 0x477ff000u ? 0x7c00u : finite;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    return static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : bounded));
  }
};

// f32 with 10 bits of mantissa, nearest, ties away from zero; infinity and NaN unchanged.
NPUZERO_INLINE float round_tf32(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x1000u) & ~0x1fffu;
  return float_of((u & 0x7f800000u) == 0x7f800000u ? u : rounded);
}

// Calls body(F32{}), body(BF16{}) or body(F16{}). The doors admit no other dtype.
template <class Body>
NPUZERO_INLINE void with_float(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::f32: return body(F32{});
    case Dtype::bf16: return body(BF16{});
    case Dtype::f16: return body(F16{});
    default: return;
  }
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero
