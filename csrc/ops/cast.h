// cast: one flat buffer into another dtype.
//
//   nearest     f32|bf16|f16 -> f32|bf16|f16, by way of f32; to nearest, ties to even; equal dtypes copy the bits
//   away        f32 -> bf16; to nearest, ties away from zero: the upper half of an f32 in two (core/flat.h)
//   tf32        f32 -> f32 with 10 bits of mantissa, to nearest, ties away from zero: PTX ISA, cvt.rna.tf32.f32 ("rna:
//               round to nearest, ties away from zero"); a finite value may round to infinity; denormals round as the
//               fixed-point numbers they are
//   stochastic  f32 -> bf16: the 16 low bits of f32's pattern are the probability (in 1/65536) of the neighbour farther
//               from zero: pattern = (pattern + r) >> 16, with the draw r of index = offset + i
//
// Draws. Places stand in rows of 2048, index = 2048 * row + column. With philox that of Philox4x32-10 (Salmon, Moraes,
// Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), under the key (seed mod 2^32, seed div 2^32):
//   C = word (column mod 4) of philox(column div 4, 2^32 - 1, 0, 0)
//   R = word (row mod 4) of philox((row div 4) mod 2^32, (row div 4) div 2^32, stream, step), both 0 in a cast
//   l = (C >> 17) + (R >> 19)
//   r = (C + R + l * l) mod 2^16
// So a draw is five operations of 32 bits, none of which overflows 31 where C and R are cut to 16 bits first, or four
// of 16 bits; no row's counter is a column's, as row div 4 is below 2^50. If all words are independent and uniform, so
// are any three draws: the low halves of C and R, which are in no l, make them so whatever the l are, as three places
// in a table of rows and columns close no cycle (tabulation: Carter, Wegman: "Universal classes of hash functions",
// JCSS 18, 1979). Hence what stochastic rounding adds to a sum has mean zero and the variance of independent draws. The
// sum alone would give the fourth corner of a rectangle by the other three; the square moves it by 2 (a - a') (x - x').
// The result depends on seed and the element's index (offset + i) alone: not on threads, sharding or device.
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
