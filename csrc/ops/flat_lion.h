// flat_lion: one Lion update of many ranges ("parts") in place, by one launch.
//
//   g = f32(grad) * scale                    scale = *grad_scale (1 without one), negated by maximize
//   c = beta1 * m + (1 - beta1) * g
//   p = p * decay - step_size * sign(c)      decay = 1 - lr * weight_decay, step_size = lr
//   m = beta2 * m + (1 - beta2) * g
//   low = round(p)
//
// sign(c) is 1 above zero, -1 below, else c: zero stays where it is, and NaN is told.
// Coefficients: 1 - beta1, 1 - beta2, decay, step_size. A row of `dynamic` has step_size, decay and step.
// The formula is Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), with the
// decoupled weight decay that its authors' code takes first.
//
// Moments
//   m     with a sign, stochastically: a step moves it by (1 - beta2) of the difference, a hundredth, which to nearest
//         would be lost in so few bits
//
// Storage, draws, buffers, rounding: core/flat.h, which is part of this contract. `step` counts for draws alone.
#pragma once

#include "core/flat.h"

namespace npuzero {

struct FlatLionGroup {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size;
  bool maximize;
  uint32_t step;
  int64_t row;  // of dynamic, or -1

  static constexpr int64_t columns = 3;  // of dynamic

  NPUZERO_INLINE int used() const { return 1; }

  // With its row's coefficients.
  NPUZERO_INLINE FlatLionGroup with_row(const float* dynamic) const {
    FlatLionGroup group = *this;
    if (row >= 0) {
      const float* at = dynamic + columns * row;
      group.step_size = at[0], group.decay = at[1];
      group.step = static_cast<uint32_t>(at[2]);
    }
    return group;
  }
};

using FlatLionPart = FlatPart<1>;

struct FlatLionArgs : FlatArgs<FlatLionPart, FlatLionGroup> {
  static constexpr const char* op = "flat_lion";
  static constexpr const char* moment_names[] = {"exp_avg"};
  static constexpr int least_moments = 1;                // that every part has
  static constexpr MomentKind kinds[] = {{true, true}};  // m
};

}  // namespace npuzero
