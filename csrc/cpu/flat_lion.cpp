// The contract is in ops/flat_lion.h.
#include "ops/flat_lion.h"

#include "cpu/flat.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

template <class Grad, class Low>
void loop(const FlatLionGroup& group, float scale, float* __restrict p, float* __restrict m,
          const typename Grad::Bits* __restrict grad, uint16_t* __restrict low, int64_t n) {
  const FlatLionGroup k = group;  // a copy that no store through the pointers can change
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = Grad::widen(grad[i]) * scale;
    const float c = k.beta1 * m[i] + k.one_minus_beta1 * g;
    const float sign = c > 0.0f ? 1.0f : (c < 0.0f ? -1.0f : c);
    p[i] = p[i] * k.decay - k.step_size * sign;
    m[i] = k.beta2 * m[i] + k.one_minus_beta2 * g;
    if constexpr (!std::is_void_v<Low>) low[i] = Low::round(p[i]);
  }
}

struct Lion {
  using Args = FlatLionArgs;

  template <class Grad, class Low>
  static void update(const FlatLionGroup& group, float scale, float* p, float* const* moments,
                     const typename Grad::Bits* grad, uint16_t* low, int64_t n) {
    loop<Grad, Low>(group, scale, p, moments[0], grad, low, n);
  }
};

}  // namespace

void flat_lion(const FlatLionArgs& args, Stream) { update_parts<Lion>(args); }

}  // namespace npuzero::cpu::NPUZERO_ISA
