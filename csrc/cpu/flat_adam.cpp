// The contract is in ops/flat_adam.h. A segment is walked in tiles that fit the first-level cache: the gradient is
// widened into a buffer, the update runs in f32, the low-precision copy is taken while the masters are still near.
#include "ops/flat_adam.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

constexpr int64_t tile = 1024;

inline float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

template <bool l2, bool amsgrad>
void update(const FlatAdamGroup& group, float scale, float* __restrict p, float* __restrict m, float* __restrict v,
            float* __restrict max_v, const float* __restrict grad, int64_t n) {
  const FlatAdamGroup k = group;  // a copy that no store through the pointers can change
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float g = grad[i] * scale;
    if constexpr (l2) g = g + k.weight_decay * p[i];
    const float decayed = p[i] * k.decay;
    m[i] = k.beta1 * m[i] + k.one_minus_beta1 * g;
    v[i] = k.beta2 * v[i] + (k.one_minus_beta2 * g) * g;
    float x = v[i];
    if constexpr (amsgrad) x = max_v[i] = max_or_nan(max_v[i], x);
    p[i] = decayed - (k.step_size * m[i]) / (__builtin_sqrtf(x) / k.bias2_sqrt + k.eps);
  }
}

using Update = void (*)(const FlatAdamGroup&, float, float*, float*, float*, float*, const float*, int64_t);

Update choose(const FlatAdamGroup& group) {
  if (group.l2) return group.amsgrad ? update<true, true> : update<true, false>;
  return group.amsgrad ? update<false, true> : update<false, false>;
}

template <class Grad>
void tiles(const FlatAdamArgs& args, const FlatAdamGroup& group, float scale, int64_t begin, int64_t end) {
  auto* p = static_cast<float*>(args.master.data);
  auto* m = static_cast<float*>(args.exp_avg.data);
  auto* v = static_cast<float*>(args.exp_avg_sq.data);
  auto* max_v = args.max_exp_avg_sq ? static_cast<float*>(args.max_exp_avg_sq->data) : nullptr;
  const auto* grad = static_cast<const typename Grad::Bits*>(args.grad.data);
  const Update run = choose(group);
  float wide[tile];
  for (int64_t i = begin; i < end; i += tile) {
    const int64_t n = end - i < tile ? end - i : tile;
    const float* g = wide;
    if constexpr (std::is_same_v<Grad, F32>) {
      g = grad + i;
    } else {
      convert<Grad, F32>(grad + i, wide, n);
    }
    run(group, scale, p + i, m + i, v + i, group.amsgrad ? max_v + i : nullptr, g, n);
    if (args.low) {
      with_float(args.low->dtype, [&](auto low) {
        using Low = decltype(low);
        convert<F32, Low>(p + i, static_cast<typename Low::Bits*>(args.low->data) + i, n);
      });
    }
  }
}

}  // namespace

void flat_adam(const FlatAdamArgs& args, Stream) {
  if (args.skip && *static_cast<const float*>(args.skip->data) != 0.0f) return;
  const float grad_scale = args.grad_scale ? *static_cast<const float*>(args.grad_scale->data) : 1.0f;
  for_line(args.segments, args.segment_count, args.covered,
           [&](const FlatAdamSegment& segment, int64_t begin, int64_t end) {
             const float scale = segment.group->maximize ? -grad_scale : grad_scale;
             with_float(args.grad.dtype, [&](auto grad) {
               tiles<decltype(grad)>(args, *segment.group, scale, segment.begin + begin, segment.begin + end);
             });
           });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
