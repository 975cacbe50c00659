// The contract is in ops/flat_adam.h.
#include "ops/flat_adam.h"

#include "cpu/flat.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

inline float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

template <class Grad, class Low, bool l2, bool amsgrad>
void loop(const FlatAdamGroup& group, float scale, float* __restrict p, float* __restrict m, float* __restrict v,
          float* __restrict max_v, const typename Grad::Bits* __restrict grad, uint16_t* __restrict low, int64_t n) {
  const FlatAdamGroup k = group;  // a copy that no store through the pointers can change
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float g = Grad::widen(grad[i]) * scale;
    if constexpr (l2) g = g + k.weight_decay * p[i];
    const float decayed = p[i] * k.decay;
    m[i] = k.beta1 * m[i] + k.one_minus_beta1 * g;
    v[i] = k.beta2 * v[i] + (k.one_minus_beta2 * g) * g;
    float x = v[i];
    if constexpr (amsgrad) x = max_v[i] = max_or_nan(max_v[i], x);
    p[i] = decayed - (k.step_size * m[i]) / (__builtin_sqrtf(x) / k.bias2_sqrt + k.eps);
    if constexpr (!std::is_void_v<Low>) low[i] = Low::round(p[i]);
  }
}

struct Adam {
  using Args = FlatAdamArgs;

  template <class Grad, class Low>
  static void update(const FlatAdamGroup& group, float scale, float* p, float* const* moments,
                     const typename Grad::Bits* grad, uint16_t* low, int64_t n) {
    with_flag(group.l2, [&](auto l2) {
      with_flag(group.amsgrad, [&](auto amsgrad) {
        loop<Grad, Low, decltype(l2)::value, decltype(amsgrad)::value>(group, scale, p, moments[0], moments[1],
                                                                       moments[2], grad, low, n);
      });
    });
  }
};

}  // namespace

void flat_adam(const FlatAdamArgs& args, Stream) { update_parts<Adam>(args); }

}  // namespace npuzero::cpu::NPUZERO_ISA
