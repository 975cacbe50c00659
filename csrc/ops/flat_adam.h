// flat_adam: one Adam/AdamW update of many ranges ("parts") in place, by one launch. The parts of a flat shard have
// pointers into the same buffers, those of separate tensors into their own.
//
//   g = f32(grad) * scale                    scale = *grad_scale (1 without one), negated by maximize
//   g = g + weight_decay * p                 only where l2 (weight decay not decoupled, and not zero)
//   p = p * decay                            decay = 1 - lr * weight_decay where decoupled, else 1
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + ((1 - beta2) * g) * g
//   x = v, or with amsgrad x = max_v = max(max_v, v), NaN if either is
//   p = p - (step_size * m) / (sqrt(x) / bias2_sqrt + eps)
//   low = round(p)
//
// The coefficients come from the caller, each computed in f64 from the hyper-parameters and rounded once to f32:
//   1 - beta1, 1 - beta2, decay, step_size = lr / (1 - beta1^step), bias2_sqrt = sqrt(1 - beta2^step)
// Those of lr and step may lie on the device instead, for a step that may be skipped, or a captured graph: a group
// with a row (>= 0) takes step_size, bias2_sqrt, decay and step from that row of `dynamic`.
// The formula and its order are torch.optim.Adam's and AdamW's (torch/optim/adam.py, _single_tensor_adam), but that m
// is written there as a lerp.
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
//   m     f32; bf16, to nearest, ties away; or codes
//   v     f32; bf16, stochastically; or codes, stochastically. To nearest it could not follow its gradients: a step
//         moves it by (1 - beta2) of the difference, less than half a unit of so few bits, so it would stand still
//   max_v as v, but to nearest, ties away: a maximum of stochastic roundings would climb
//
// Codes. 8 bits an element, in blocks of moment_block elements of a part, the last may be shorter, with one byte each
// for the exponent. A code c of m is a sign (bit 7) and 7 bits of magnitude, c of v and max_v 8 bits of magnitude (a
// sign is lost). With span = 7 for m and 15 for v, and E the block's byte:
//   value     magnitude 0 is zero; else f32's bits without sign = (magnitude + 16 * (E - span)) << 19: four bits of
//             mantissa, and exponents from E down to E - span. All values of a block whose E is 255 are NaN
//   round     a = f32's bits without sign; E = max(16, (largest a of the block + 0x7ffff) >> 23)
//             magnitude = max(1, ((a + r) >> 19) - 16 * (E - span)), r = 0x40000 to nearest, a draw << 3
//             stochastically; but 0 where a < least, least = (E - span - 1) << 23 for m and 1 for v, so that no v but
//             zero becomes zero
//             E = 255 (an element not finite, or within half a unit of that) has codes 0: the block is lost as a whole
// Widening what was rounded and rounding it again gives the same values. No division, no table, no float operation.
//
// Draws are those of ops/cast.h, with index = place + i for element i of a part; stream + 2^31 for v. So they depend on
// seed, step, stream (which parameter) and place (in that parameter) alone, not on cut, threads or device.
//
// Contract
//   each of p, m, v, max_v: count elements of each part, in place; max_v null unless group.amsgrad; m, v and max_v of a
//   part have one dtype: f32, bf16 or u8 (codes, blocks counted from the part's start)
//   grad: f32|bf16|f16[count], read only; low: bf16|f16[count], written only, or null; null where p is not f32
//   remainder: i16[count], in place, where p is bf16 in two halves, else null
//   grad_scale, skip: f32[1] on the device, or null; where *skip != 0 (or is NaN) nothing at all is written
//   dynamic: f32[rows, 4] on the device, or null where no group has a row; step in it is a whole number
//   count = 0 and no parts are legal; no two buffers overlap; enqueued on the stream, not awaited
//   stream < 2^31; 0 <= place, place + count < 2^63
//   rounding: f32 operations one by one in the order written, no contraction, correctly rounded division and square
//   root; equal to the reference bit for bit (a NaN's payload aside)
#pragma once

#include "core/inline.h"
#include "core/view.h"

namespace npuzero {

constexpr int64_t moment_block = 64;

struct FlatAdamGroup {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size, bias2_sqrt;
  bool l2, maximize, amsgrad;
  uint32_t step;
  int64_t row;  // of dynamic, or -1

  static constexpr int64_t columns = 4;  // of dynamic

  // With its row's coefficients.
  NPUZERO_INLINE FlatAdamGroup with_row(const float* dynamic) const {
    FlatAdamGroup group = *this;
    if (row >= 0) {
      const float* at = dynamic + columns * row;
      group.step_size = at[0], group.bias2_sqrt = at[1], group.decay = at[2];
      group.step = static_cast<uint32_t>(at[3]);
    }
    return group;
  }
};

struct FlatAdamMoment {
  void* values;
  uint8_t* exponents;  // of codes: one a block
};

struct FlatAdamPart {
  void* master;  // p
  int16_t* remainder;
  FlatAdamMoment exp_avg, exp_avg_sq, max_exp_avg_sq;  // m, v, max_v
  const void* grad;
  void* low;
  int64_t count;
  int64_t line;  // elements of all parts before this one
  int64_t group, place;
  uint32_t stream;
  Dtype master_dtype, moment_dtype, grad_dtype, low_dtype;
};

struct FlatAdamArgs {
  static constexpr const char* op = "flat_adam";
  const FlatAdamPart* parts;
  int64_t part_count, total;
  const FlatAdamGroup* groups;
  const float *grad_scale, *skip, *dynamic;
  uint64_t seed;
};

}  // namespace npuzero
