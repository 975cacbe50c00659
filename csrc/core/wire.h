// Values on a thin wire: 8 or 4 bits an element, in blocks that share a scale, and how they lie in a message. What
// ops/quantize.h writes and ops/dequantize_sum.h reads.
//
// A message of n elements is n codes, and behind them a scale for each block: a bf16 (the upper half of an f32), above
// zero, or NaN for a block that is lost. With bits = 8 a code is an i8, -127 to 127; with 4 it is half a byte, -7 to 7
// in two's complement, the first of two elements in the lower half. A value is code * scale, exact in f32, or infinite
// where rounding led beyond the largest finite one.
// A message begins at a multiple of message_start and takes a whole number of message_line bytes, so that messages lie
// side by side; what is behind the scales is not written.
#pragma once

#include <cstdint>

namespace npuzero {

constexpr int64_t message_start = 64, message_line = 512;

constexpr int64_t wire_block(int bits) { return bits == 8 ? 256 : 128; }
constexpr float wire_largest(int bits) { return bits == 8 ? 127.0f : 7.0f; }
constexpr int64_t code_bytes(int64_t n, int bits) { return n * bits / 8; }
constexpr int64_t message_bytes(int64_t n, int bits) {
  return (code_bytes(n, bits) + n / wire_block(bits) * 2 + message_line - 1) / message_line * message_line;
}

}  // namespace npuzero
