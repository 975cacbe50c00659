// dequantize_sum: adds up what several ranks sent over a thin wire (core/wire.h).
//
//   s   = code * scale of row 0                 row by row, each next one added
//   out = round(s)
//   out = round(f32(out) + s)                   where accumulate: the sum first, then the addition
//
// Contract
//   messages: u8, `rows` times `pieces` messages side by side, the pieces of a row one after another; out:
//   f32|bf16|f16[n], in `pieces` equal pieces, each a whole number of blocks; rows at least 1; bits: 8 or 4
//   n = 0 is legal; messages and out do not overlap; enqueued on the stream
//   rounding: f32 operations in the order written, one by one, no contraction, then one rounding to nearest, ties to
//   even (core/numeric.h); denormals are values like any other in all modes of a processor; equal to the reference bit
//   for bit (a NaN's payload and sign aside)
#pragma once

#include "core/view.h"
#include "core/wire.h"

namespace npuzero {

struct DequantizeSumArgs {
  static constexpr const char* op = "dequantize_sum";
  View messages, out;
  int64_t rows, pieces;
  int bits;
  bool accumulate;
};

}  // namespace npuzero
