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
// with a row (>= 0) takes step_size, bias2_sqrt and decay from that row of `dynamic`.
// The formula and its order are torch.optim.Adam's and AdamW's (torch/optim/adam.py, _single_tensor_adam), but that m
// is written there as a lerp.
//
// Contract
//   p (master), m (exp_avg), v (exp_avg_sq), max_v: f32[count] of each part, in place; max_v null unless group.amsgrad
//   grad: f32|bf16|f16[count], read only; low: bf16|f16[count], written only, or null
//   grad_scale, skip: f32[1] on the device, or null; where *skip != 0 (or is NaN) nothing at all is written
//   dynamic: f32[rows, 3] on the device, or null where no group has a row
//   count = 0 and no parts are legal; no two buffers overlap; enqueued on the stream, not awaited
//   rounding: f32 operations one by one in the order written, no contraction, correctly rounded division and square
//   root; equal to the reference bit for bit (a NaN's payload aside)
#pragma once

#include "core/view.h"

namespace npuzero {

struct FlatAdamGroup {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size, bias2_sqrt;
  bool l2, maximize, amsgrad;
  int64_t row;  // of dynamic, or -1
};

struct FlatAdamPart {
  float *master, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  const void* grad;
  void* low;
  int64_t count;
  int64_t line;  // elements of all parts before this one
  int64_t group;
  Dtype grad_dtype, low_dtype;
};

struct FlatAdamArgs {
  static constexpr const char* op = "flat_adam";
  const FlatAdamPart* parts;
  int64_t part_count, total;
  const FlatAdamGroup* groups;
  const float *grad_scale, *skip, *dynamic;

  static constexpr int64_t columns = 3;  // of dynamic

  // Group i with its row's coefficients.
  FlatAdamGroup group(int64_t i) const {
    FlatAdamGroup group = groups[i];
    if (group.row >= 0) {
      const float* row = dynamic + columns * group.row;
      group.step_size = row[0], group.bias2_sqrt = row[1], group.decay = row[2];
    }
    return group;
  }
};

}  // namespace npuzero
