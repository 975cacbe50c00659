// What the updates of flat shards share (ops/flat_adam.h, ops/flat_lion.h): many ranges ("parts") are updated in place
// by one launch. The parts of a flat shard have pointers into the same buffers, those of separate tensors into their
// own. An op's contract says by which formula p and its moments follow the gradient, and which moments have a sign and
// are rounded by chance; the rest is here.
//
// Storage. Whatever is stored, the formula is computed in f32: values are widened before it and rounded after it.
//   p     f32
//         bf16 and a remainder of 16 bits, an f32 in two halves: f32's bits = (bf16's bits << 16) + remainder, signed.
//           The bf16 is the f32 to nearest, ties away from zero; so each f32 has one such pair, and results have the
//           bits they have with an f32 p and a bf16 low. Beyond the largest finite bf16 the bf16 is infinity and the
//           remainder leads back to the finite value; infinity has remainder 0; NaN is a NaN with remainder 0
//         bf16 alone, rounded stochastically (ops/cast.h)
//   low   bf16, to nearest, ties away from zero: the upper half of an f32 p. f16, to nearest, ties to even. Of either
//         beyond the largest finite value infinity; denormals are kept; NaN stays NaN
//   a moment  f32; bf16, to nearest, ties away, or by chance, stochastically; or codes, to nearest or stochastically
//
// Codes. 8 bits an element, in blocks of moment_block elements of a part, the last may be shorter, with one byte each
// for the exponent. A code with a sign is a sign (bit 7) and 7 bits of magnitude, one without is 8 bits of magnitude (a
// sign is lost). With span = 7 with a sign and 15 without, and E the block's byte:
//   value     magnitude 0 is zero; else f32's bits without sign = (magnitude + 16 * (E - span)) << 19: four bits of
//             mantissa, and exponents from E down to E - span. All values of a block whose E is 255 are NaN
//   round     a = f32's bits without sign; E = max(16, (largest a of the block + 0x7ffff) >> 23)
//             magnitude = max(1, ((a + r) >> 19) - 16 * (E - span)), r = 0x40000 to nearest, a draw << 3
//             stochastically; but 0 where a < least, least = (E - span - 1) << 23 with a sign and 1 without, so that
//             nothing but zero becomes zero there
//             E = 255 (an element not finite, or within half a unit of that) has codes 0: the block is lost as a whole
// Widening what was rounded and rounding it again gives the same values. No division, no table, no float operation.
//
// Draws are those of ops/cast.h, with index = place + i for element i of a part; stream + 2^31 for a moment. So they
// depend on seed, step, stream (which parameter) and place (in that parameter) alone: not on sharding, threads or
// device.
//
// Coefficients come from the caller, each computed in f64 from the hyper-parameters and rounded once to f32. Those of
// lr and step may lie on the device instead, for a step that may be skipped, or a captured graph: a group with a row
// (>= 0) takes them from that row of `dynamic`.
//
// Contract
//   each of p and the moments: count elements of each part, in place; the moments of a part have one dtype: f32, bf16
//   or u8 (codes, blocks counted from the part's start); null for those that its group does not use
//   grad: f32|bf16|f16[count], read only; low: bf16|f16[count], written only, or null; null where p is not f32
//   remainder: i16[count], in place, where p is bf16 in two halves, else null
//   grad_scale, skip: f32[1] on the device, or null; where *skip != 0 (or is NaN) nothing at all is written
//   dynamic: f32[rows, columns] on the device, or null where no group has a row; step in it is a whole number
//   count = 0 and no parts are legal; no two buffers overlap; enqueued on the stream, not awaited
//   stream < 2^31; 0 <= place, place + count < 2^63
//   rounding: f32 operations one by one in the order written, no contraction, correctly rounded division and square
//   root; equal to the reference bit for bit (a NaN's payload aside)
#pragma once

#include <type_traits>

#include "core/inline.h"
#include "core/view.h"

namespace npuzero {

constexpr int64_t moment_block = 64;
constexpr uint32_t moment_stream = 0x80000000u;  // what is added to a part's stream for the draws of a moment

struct Moment {
  void* values;
  uint8_t* exponents;  // of codes: one a block
};

struct MomentKind {
  bool with_sign, by_chance;
};

template <int moment_count>
struct FlatPart {
  void* master;  // p
  int16_t* remainder;
  Moment moments[moment_count];
  const void* grad;
  void* low;
  int64_t count;
  int64_t line;  // elements of all parts before this one
  int64_t group, place;
  uint32_t stream;
  Dtype master_dtype, moment_dtype, grad_dtype, low_dtype;
};

// A group of an op has `row`, `step`, `maximize` and
//   used()              its moments, the first so many of its parts'
//   with_row(dynamic)   itself with its row's coefficients
template <class FlatPart, class FlatGroup>
struct FlatArgs {
  using Part = FlatPart;
  using Group = FlatGroup;
  static constexpr int moment_count = std::extent_v<decltype(Part::moments)>;

  const Part* parts;
  int64_t part_count, total;
  const Group* groups;
  const float *grad_scale, *skip, *dynamic;
  uint64_t seed;
};

}  // namespace npuzero
