// The contract is in ops/flat_adam.h. There is a kernel for each way in which masters and moments are stored; whatever
// else differs between parts is asked at run time, where a block's threads give one answer.
#include <cmath>

#include "core/codes.h"
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "cuda/random.cuh"
#include "ops/flat_adam.h"

namespace npuzero::cuda {
namespace {

enum class Masters { f32, split, none };

static_assert(chunk % moment_block == 0 && moment_block % group == 0, "no chunk cuts a block of codes");
constexpr int block_threads = moment_block / group;  // of a warp, that hold one block of codes

// A part as a kernel is sent it. `beside` is low where masters are f32, the remainder where they are split.
struct Part {
  void *master, *beside, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  const void* grad;
  int64_t count, place;
  uint32_t stream;
  uint8_t group, grad_dtype, low_dtype;

  Part() = default;
  Part(const FlatAdamPart& part, int group)
      : master(part.master),
        beside(part.remainder ? part.remainder : part.low),
        exp_avg(part.exp_avg.values),
        exp_avg_sq(part.exp_avg_sq.values),
        max_exp_avg_sq(part.max_exp_avg_sq.values),
        grad(part.grad),
        count(part.count),
        place(part.place),
        stream(part.stream),
        group(static_cast<uint8_t>(group)),
        grad_dtype(static_cast<uint8_t>(part.grad_dtype)),
        low_dtype(static_cast<uint8_t>(part.low_dtype)) {}
};

struct PartWithCodes : Part {
  uint8_t *exp_avg_exponents, *exp_avg_sq_exponents, *max_exp_avg_sq_exponents;

  PartWithCodes() = default;
  PartWithCodes(const FlatAdamPart& part, int group)
      : Part(part, group),
        exp_avg_exponents(part.exp_avg.exponents),
        exp_avg_sq_exponents(part.exp_avg_sq.exponents),
        max_exp_avg_sq_exponents(part.max_exp_avg_sq.exponents) {}
};

template <Dtype moments>
using PartOf = std::conditional_t<moments == Dtype::u8, PartWithCodes, Part>;

constexpr int most_groups = 32;

// A kernel's parameters.
template <Dtype moments>
struct Sent {
  static constexpr int capacity = (parameter_bytes - 64 - most_groups * static_cast<int>(sizeof(FlatAdamGroup))) /
                                  static_cast<int>(sizeof(PartOf<moments>) + sizeof(uint32_t));

  Table<PartOf<moments>, capacity> table;
  FlatAdamGroup groups[most_groups];
  const float *grad_scale, *skip, *dynamic;
  uint64_t seed;
};

// -- moments ----------------------------------------------------------------------------------------------------------

template <Dtype moments, bool with_sign>
__device__ Group<float> load_moment(const void* values, const uint8_t* exponents, Span span) {
  if constexpr (moments == Dtype::f32) {
    return load(static_cast<const float*>(values), span);
  } else if constexpr (moments == Dtype::bf16) {
    return widened<BF16>(load(static_cast<const uint16_t*>(values), span));
  } else {
    const Group<uint8_t> codes = load(static_cast<const uint8_t*>(values), span);
    const uint32_t exponent = span.has(0) ? exponents[span.first / moment_block] : 0;
    Group<float> to;
#pragma unroll
    for (int k = 0; k < group; ++k) to.at[k] = Code<with_sign>::widen(codes.at[k], exponent);
    return to;
  }
}

// All threads of a warp come here, whether they have elements or not: those of a block find its exponent together.
template <bool with_sign>
__device__ void store_codes(uint8_t* values, uint8_t* exponents, Span span, const Group<float>& from,
                            const Draws* draws) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < group; ++k) {
    const uint32_t absolute = bits_of(from.at[k]) & 0x7fffffffu;
    if (span.has(k) && absolute > largest) largest = absolute;
  }
#pragma unroll
  for (int apart = block_threads / 2; apart > 0; apart /= 2) {
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, largest, apart, block_threads);
    largest = theirs > largest ? theirs : largest;
  }
  const uint32_t exponent = Code<with_sign>::exponent_of(largest);
  Group<uint8_t> codes = {};
  if (exponent != Code<with_sign>::not_finite) {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const uint32_t add = draws ? static_cast<uint32_t>((*draws)[k]) << 3 : 0x40000u;
      codes.at[k] = Code<with_sign>::round(from.at[k], exponent, add);
    }
  }
  store(values, span, codes);
  if (span.first % moment_block == 0 && span.has(0)) {
    exponents[span.first / moment_block] = static_cast<uint8_t>(exponent);
  }
}

// To nearest where there are no draws.
template <Dtype moments, bool with_sign>
__device__ void store_moment(void* values, uint8_t* exponents, Span span, const Group<float>& from,
                             const Draws* draws) {
  if constexpr (moments == Dtype::f32) {
    store(static_cast<float*>(values), span, from);
  } else if constexpr (moments == Dtype::bf16) {
    store(static_cast<uint16_t*>(values), span, draws ? rounded(from, *draws) : rounded<UpperHalf>(from));
  } else {
    store_codes<with_sign>(static_cast<uint8_t*>(values), exponents, span, from, draws);
  }
}

// -- the update -------------------------------------------------------------------------------------------------------

__device__ float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

__device__ Group<float> load_grad(const Part& part, Span span) {
  Group<float> grad;
  with_float(static_cast<Dtype>(part.grad_dtype), [&](auto type) {
    using Type = decltype(type);
    grad = widened<Type>(load(static_cast<const typename Type::Bits*>(part.grad), span));
  });
  return grad;
}

template <Masters masters>
__device__ Group<float> load_master(const Part& part, Span span) {
  if constexpr (masters == Masters::f32) {
    return load(static_cast<const float*>(part.master), span);
  } else {
    const Group<uint16_t> upper = load(static_cast<const uint16_t*>(part.master), span);
    if constexpr (masters == Masters::none) return widened<BF16>(upper);
    const Group<int16_t> remainder = load(static_cast<const int16_t*>(part.beside), span);
    Group<float> p;
#pragma unroll
    for (int k = 0; k < group; ++k) p.at[k] = UpperHalf::join(upper.at[k], remainder.at[k]);
    return p;
  }
}

template <Masters masters>
__device__ void store_master(const Part& part, Span span, const Group<float>& p, uint32_t step, uint64_t seed) {
  if constexpr (masters == Masters::f32) {
    store(static_cast<float*>(part.master), span, p);
    auto* low = static_cast<uint16_t*>(part.beside);
    if (low && static_cast<Dtype>(part.low_dtype) == Dtype::bf16) {
      store(low, span, rounded<UpperHalf>(p));
    } else if (low) {
      store(low, span, rounded<F16>(p));
    }
  } else if constexpr (masters == Masters::split) {
    store(static_cast<uint16_t*>(part.master), span, rounded<UpperHalf>(p));
    Group<int16_t> remainder;
#pragma unroll
    for (int k = 0; k < group; ++k) remainder.at[k] = UpperHalf::remainder(p.at[k]);
    store(static_cast<int16_t*>(part.beside), span, remainder);
  } else {
    store(static_cast<uint16_t*>(part.master), span,
          rounded(p, Draws(part.place + span.first, part.stream, step, seed)));
  }
}

template <Masters masters, Dtype moments>
__device__ void update(const PartOf<moments>& part, const FlatAdamGroup& k, float scale, uint64_t seed, Span span) {
  uint8_t *m_exponents = nullptr, *v_exponents = nullptr, *max_v_exponents = nullptr;
  if constexpr (moments == Dtype::u8) {
    m_exponents = part.exp_avg_exponents, v_exponents = part.exp_avg_sq_exponents;
    max_v_exponents = part.max_exp_avg_sq_exponents;
  }
  Group<float> p = load_master<masters>(part, span);
  Group<float> m = load_moment<moments, true>(part.exp_avg, m_exponents, span);
  Group<float> v = load_moment<moments, false>(part.exp_avg_sq, v_exponents, span);
  Group<float> max_v;
  if (k.amsgrad) max_v = load_moment<moments, false>(part.max_exp_avg_sq, max_v_exponents, span);
  const Group<float> grad = load_grad(part, span);
#pragma unroll
  for (int i = 0; i < group; ++i) {
    float g = grad.at[i] * scale;
    if (k.l2) g = g + k.weight_decay * p.at[i];
    const float decayed = p.at[i] * k.decay;
    m.at[i] = k.beta1 * m.at[i] + k.one_minus_beta1 * g;
    v.at[i] = k.beta2 * v.at[i] + (k.one_minus_beta2 * g) * g;
    float x = v.at[i];
    if (k.amsgrad) x = max_v.at[i] = max_or_nan(max_v.at[i], x);
    p.at[i] = decayed - (k.step_size * m.at[i]) / (sqrtf(x) / k.bias2_sqrt + k.eps);
  }
  store_master<masters>(part, span, p, k.step, seed);
  store_moment<moments, true>(part.exp_avg, m_exponents, span, m, nullptr);
  if constexpr (moments == Dtype::f32) {
    store_moment<moments, false>(part.exp_avg_sq, v_exponents, span, v, nullptr);
  } else {
    const Draws draws(part.place + span.first, part.stream + 0x80000000u, k.step, seed);
    store_moment<moments, false>(part.exp_avg_sq, v_exponents, span, v, &draws);
  }
  if (k.amsgrad) store_moment<moments, false>(part.max_exp_avg_sq, max_v_exponents, span, max_v, nullptr);
}

template <Masters masters, Dtype moments>
__global__ void __launch_bounds__(threads) update_parts(const __grid_constant__ Sent<moments> sent) {
  if (sent.skip && *sent.skip != 0.0f) return;
  const float grad_scale = sent.grad_scale ? *sent.grad_scale : 1.0f;
  for_chunks(sent.table, [&](const PartOf<moments>& part, int64_t begin) {
    const FlatAdamGroup group = sent.groups[part.group].with_row(sent.dynamic);
    const float scale = group.maximize ? -grad_scale : grad_scale;
#pragma unroll 1
    for (int u = 0; u < in_flight; ++u) {
      update<masters, moments>(part, group, scale, sent.seed, Span{begin + u * stride, part.count});
    }
  });
}

// -- the host's side --------------------------------------------------------------------------------------------------

Masters masters_of(const FlatAdamPart& part) {
  if (part.master_dtype == Dtype::f32) return Masters::f32;
  return part.remainder ? Masters::split : Masters::none;
}

// Launches for parts `first` to `last`, which are stored alike: as few as their tables need.
template <Masters masters, Dtype moments>
void run(const FlatAdamArgs& args, int64_t first, int64_t last, Stream stream) {
  Sent<moments> sent;
  sent.grad_scale = args.grad_scale, sent.skip = args.skip, sent.dynamic = args.dynamic, sent.seed = args.seed;
  int64_t group_of[most_groups];  // the number in args of each group in `sent`
  int groups = 0;
  const auto flush = [&] {
    if (sent.table.chunks() > 0) {
      launch(FlatAdamArgs::op, update_parts<masters, moments>, grid_for(sent.table.chunks()), threads, stream, sent);
    }
    sent.table.count = 0;
    groups = 0;
  };
  const auto add = [&](const FlatAdamPart& part) {
    const int group = static_cast<int>(std::find(group_of, group_of + groups, part.group) - group_of);
    if (group == most_groups || !sent.table.add(PartOf<moments>(part, group), part.count)) return false;
    if (group == groups) {
      group_of[groups] = part.group;
      sent.groups[groups++] = args.groups[part.group];
    }
    return true;
  };
  for (int64_t i = first; i < last; ++i) {
    if (args.parts[i].count == 0 || add(args.parts[i])) continue;
    flush();
    add(args.parts[i]);
  }
  flush();
}

template <Masters masters>
void run(const FlatAdamArgs& args, int64_t first, int64_t last, Stream stream) {
  switch (args.parts[first].moment_dtype) {
    case Dtype::f32: return run<masters, Dtype::f32>(args, first, last, stream);
    case Dtype::bf16: return run<masters, Dtype::bf16>(args, first, last, stream);
    default: return run<masters, Dtype::u8>(args, first, last, stream);
  }
}

}  // namespace

void flat_adam(const FlatAdamArgs& args, Stream stream) {
  const auto alike = [&](int64_t i, int64_t j) {
    return masters_of(args.parts[i]) == masters_of(args.parts[j]) &&
           args.parts[i].moment_dtype == args.parts[j].moment_dtype;
  };
  for (int64_t first = 0, last; first < args.part_count; first = last) {
    for (last = first + 1; last < args.part_count && alike(first, last);) ++last;
    switch (masters_of(args.parts[first])) {
      case Masters::f32: run<Masters::f32>(args, first, last, stream); break;
      case Masters::split: run<Masters::split>(args, first, last, stream); break;
      case Masters::none: run<Masters::none>(args, first, last, stream); break;
    }
  }
}

}  // namespace npuzero::cuda
