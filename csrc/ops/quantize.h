// quantize: rounds a flat buffer to a few bits an element, for a thin wire (core/wire.h).
//
//   x        = f32(source) + residual                          (f32(source) where there is no residual)
//   scale    = bf16(max(largest |x| of the block * (1 / k), 2^-120)), rounded up      k = 127 or 7
//   code     = round(x * (1 / scale))
//   residual = x - code * scale                                what rounding lost; the next call adds it again
//
// Contract
//   source: f32|bf16|f16[n], in `pieces` equal pieces, each a whole number of blocks; message: u8, for each piece a
//   message, side by side; residual: f32[n] or null, read and written; bits: 8 or 4
//   n = 0 is legal; source, message and residual do not overlap; enqueued on the stream
//   A block of which any x is not finite is lost as a whole: its scale is NaN (0x7fc0), its codes are 0, and its
//   residuals become 0. So an overflow is told on the other side, and forgotten here. Where code * scale is infinite
//   though x is not (within half a scale of the largest), so is the residual: the next call forgets it.
//   rounding: f32 operations in the order written, one by one, no contraction; 1 / k and 1 / scale are f32 divisions;
//   bf16 upwards: (f32's bits + 0xffff) >> 16; codes to nearest, ties to even. No code is beyond k, since the scale is
//   never less than the largest / k by more than the rounding of that product, which codes are too coarse to see.
//   Denormals are values like any other in all modes of a processor; but what is below 2^-121, and so each of them, has
//   the code 0. So has -0, whose residual is -0.
//   equal to the reference bit for bit
#pragma once

#include "core/view.h"
#include "core/wire.h"

namespace npuzero {

struct QuantizeArgs {
  static constexpr const char* op = "quantize";
  View source, message;
  float* residual;
  int64_t pieces;
  int bits;
};

}  // namespace npuzero
