// The contract is in ops/flat_adam.h. A part is walked in tiles that fit the first-level cache: the gradient is widened
// into a buffer, the update runs in f32, the low-precision copy is taken while the masters are still near.
#include "ops/flat_adam.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

inline float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

// Elements of a part, as the loop sees them. Grad is F32 or BF16; Low is BF16, or void where there is nothing to write.
template <class Grad, class Low, bool l2, bool amsgrad>
void update(const FlatAdamGroup& group, float scale, float* __restrict p, float* __restrict m, float* __restrict v,
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

template <class Body>
void with_flag(bool flag, const Body& body) {
  flag ? body(std::true_type{}) : body(std::false_type{});
}

// n elements of a part from `begin`, at most a tile; low is where their rounded copy goes, or null. Only bf16 is
// converted in the loop itself: for f16 there is a unit, which works on whole tiles.
template <class Grad, class Low>
void step(const FlatAdamPart& part, const FlatAdamGroup& group, float scale, uint16_t* low, int64_t begin, int64_t n) {
  const auto* grad = static_cast<const typename Grad::Bits*>(part.grad) + begin;
  float* p = part.master + begin;
  float* max_v = group.amsgrad ? part.max_exp_avg_sq + begin : nullptr;
  if constexpr (std::is_same_v<Grad, F16>) {
    float wide[tile];
    convert<F16, F32>(grad, wide, n);
    FlatAdamPart widened = part;
    widened.grad = wide - begin;
    step<F32, Low>(widened, group, scale, low, begin, n);
  } else if constexpr (std::is_same_v<Low, F16>) {
    step<Grad, void>(part, group, scale, nullptr, begin, n);
    convert<F32, F16>(p, low, n);
  } else {
    with_flag(group.l2, [&](auto l2) {
      with_flag(group.amsgrad, [&](auto amsgrad) {
        update<Grad, Low, decltype(l2)::value, decltype(amsgrad)::value>(group, scale, p, part.exp_avg + begin,
                                                                         part.exp_avg_sq + begin, max_v, grad, low, n);
      });
    });
  }
}

template <class Grad>
void walk(const FlatAdamPart& part, const FlatAdamGroup& group, float scale, bool streaming, int64_t begin,
          int64_t end) {
  const auto with_low = [&](auto low) {
    write(static_cast<uint16_t*>(part.low) + begin, end - begin, streaming,
          [&](uint16_t* out, int64_t first, int64_t n) {
            step<Grad, decltype(low)>(part, group, scale, out, begin + first, n);
          });
  };
  if (!part.low) {
    for (int64_t i = begin; i < end; i += tile) {
      step<Grad, void>(part, group, scale, nullptr, i, std::min(tile, end - i));
    }
  } else if (part.low_dtype == Dtype::bf16) {
    with_low(BF16{});
  } else {
    with_low(F16{});
  }
}

}  // namespace

void flat_adam(const FlatAdamArgs& args, Stream) {
  if (args.skip && *args.skip != 0.0f) return;
  const float grad_scale = args.grad_scale ? *args.grad_scale : 1.0f;
  const bool streaming = args.total * 2 >= stream_bytes;  // of low, were it everywhere
  for_line(args.parts, args.part_count, args.total, [&](const FlatAdamPart& part, int64_t begin, int64_t end) {
    const FlatAdamGroup group = args.group(part.group);
    const float scale = group.maximize ? -grad_scale : grad_scale;
    with_float(part.grad_dtype, [&](auto grad) { walk<decltype(grad)>(part, group, scale, streaming, begin, end); });
  });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
