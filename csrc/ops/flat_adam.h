// flat_adam: one Adam/AdamW update of many ranges ("parts") in place, by one launch.
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
// Coefficients: 1 - beta1, 1 - beta2, decay, step_size = lr / (1 - beta1^step), bias2_sqrt = sqrt(1 - beta2^step). A
// row of `dynamic` has step_size, bias2_sqrt, decay and step.
// The formula and its order are torch.optim.Adam's and AdamW's (torch/optim/adam.py, _single_tensor_adam), but that m
// is written there as a lerp.
//
// Moments
//   m     with a sign, to nearest
//   v     without a sign, stochastically. To nearest it could not follow its gradients: a step moves it by
//         (1 - beta2) of the difference, less than half a unit of so few bits, so it would stand still
//   max_v as v, but to nearest: a maximum of stochastic roundings would climb. Null unless group.amsgrad
//
// Storage, draws, buffers, rounding: core/flat.h, which is part of this contract.
#pragma once

#include "core/flat.h"

namespace npuzero {

struct FlatAdamGroup {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size, bias2_sqrt;
  bool l2, maximize, amsgrad;
  uint32_t step;
  int64_t row;  // of dynamic, or -1

  static constexpr int64_t columns = 4;  // of dynamic

  NPUZERO_INLINE int used() const { return amsgrad ? 3 : 2; }

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

using FlatAdamPart = FlatPart<3>;

struct FlatAdamArgs : FlatArgs<FlatAdamPart, FlatAdamGroup> {
  static constexpr const char* op = "flat_adam";
  static constexpr const char* moment_names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr int least_moments = 2;                                                // that every part has
  static constexpr MomentKind kinds[] = {{true, false}, {false, true}, {false, false}};  // m, v, max_v
};

}  // namespace npuzero
