// cast: one flat buffer into another dtype.
//
//   nearest     f32|bf16|f16 -> f32|bf16|f16, by way of f32; to nearest, ties to even; equal dtypes copy the bits
//   away        f32 -> bf16; to nearest, ties away from zero: the upper half of an f32 in two (ops/flat_adam.h)
//   tf32        f32 -> f32 with 10 bits of mantissa, to nearest, ties away from zero: PTX ISA, cvt.rna.tf32.f32 ("rna:
//               round to nearest, ties away from zero"); a finite value may round to infinity; denormals round as the
//               fixed-point numbers they are
//   stochastic  f32 -> bf16: the 16 low bits of f32's pattern are the probability (in 1/65536) of the neighbour farther
//               from zero: pattern = (pattern + r) >> 16. A draw of Philox4x32-10 (Salmon, Moraes, Dror, Shaw:
//               "Parallel random numbers: as easy as 1, 2, 3", SC 2011) serves 8 elements with 16 bits each. With index
//               = offset
//               + i: the counter is (block mod 2^32, block div 2^32, 0, 0), block = index div 8; the key (seed mod
//               2^32, seed div 2^32); r is the low half of word (index mod 8) div 2 where index is even, else the high
//               half. So the result depends on the element's place in the whole alone, not on threads, cut or device.
//
// Contract
//   source and target have n elements and do not overlap; tf32 may be in place
//   infinity stays infinity, NaN stays NaN (payload aside), denormals are values like any other in all modes
//   n = 0 is legal; 0 <= offset, offset + n < 2^63; enqueued on the stream, not awaited; bit for bit the reference
#pragma once

#include "core/view.h"

namespace npuzero {

enum class Rounding : int { nearest = 0, stochastic = 1, tf32 = 2, away = 3 };

struct CastArgs {
  static constexpr const char* op = "cast";
  View source, target;
  Rounding rounding;
  uint64_t seed, offset;
};

}  // namespace npuzero
