// The contract is in ops/flat_adam.h. A part is walked in tiles that fit the first-level cache: what is not stored in
// f32 is widened into buffers, the update runs in f32, and its results are rounded while they are still near.
#include "ops/flat_adam.h"

#include "cpu/blocks.h"
#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "cpu/random.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

static_assert(chunk_multiple % moment_block == 0 && tile % moment_block == 0, "nothing cuts a block");

inline float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

// Elements of a part, as the loop sees them. Grad is F32 or BF16; Low is UpperHalf, or void where there is nothing to
// write.
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

void join(const uint16_t* __restrict upper, const int16_t* __restrict remainder, float* __restrict p, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) p[i] = UpperHalf::join(upper[i], remainder[i]);
}

void split(const float* __restrict p, uint16_t* __restrict upper, int16_t* __restrict remainder, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    upper[i] = UpperHalf::round(p[i]);
    remainder[i] = UpperHalf::remainder(p[i]);
  }
}

void round_stochastically(const float* __restrict x, uint16_t* __restrict out, const uint16_t* __restrict random,
                          int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = round_stochastic(x[i], random[i]);
}

// Calls body(code, its exponent, first element, elements) for the blocks of n elements from `begin`.
template <class Body>
void each_block(const FlatAdamMoment& moment, int64_t begin, int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += moment_block) {
    body(static_cast<uint8_t*>(moment.values) + begin + i, moment.exponents[(begin + i) / moment_block], i,
         std::min(moment_block, n - i));
  }
}

// A moment of n elements from `begin` in f32: memory itself where it is that, else `room`.
template <bool with_sign>
float* widened(const FlatAdamMoment& moment, Dtype dtype, int64_t begin, int64_t n, float* room) {
  if (dtype == Dtype::f32) return static_cast<float*>(moment.values) + begin;
  if (dtype == Dtype::bf16) {
    convert<BF16, F32>(static_cast<const uint16_t*>(moment.values) + begin, room, n);
  } else {
    each_block(moment, begin, n, [&](const uint8_t* codes, uint8_t exponent, int64_t i, int64_t count) {
      widen_block<with_sign>(codes, exponent, room + i, count);
    });
  }
  return room;
}

// Back from `room`, to nearest where there is no `random`.
template <bool with_sign>
void rounded(const FlatAdamMoment& moment, Dtype dtype, int64_t begin, int64_t n, const float* room,
             const uint16_t* random) {
  if (dtype == Dtype::bf16) {
    auto* out = static_cast<uint16_t*>(moment.values) + begin;
    random ? round_stochastically(room, out, random, n) : convert<F32, UpperHalf>(room, out, n);
  } else if (dtype == Dtype::u8) {
    each_block(moment, begin, n, [&](uint8_t* codes, uint8_t& exponent, int64_t i, int64_t count) {
      const auto round = [&](const auto& add) { exponent = round_block<with_sign>(room + i, codes, count, add); };
      if (random) {
        round([here = random + i](int64_t j) { return static_cast<uint32_t>(here[j]) << 3; });
      } else {
        round([](int64_t) { return 0x40000u; });
      }
    });
  }
}

template <class Body>
void with_flag(bool flag, const Body& body) {
  flag ? body(std::true_type{}) : body(std::false_type{});
}

// A part with its group's coefficients: what the walk carries along.
struct Walk {
  const FlatAdamPart& part;
  const FlatAdamGroup group;
  float scale;
  uint64_t seed;

  const uint16_t* draws(uint32_t stream, int64_t begin, int64_t n, uint16_t* room) const {
    Draws{seed, stream, group.step}.make(static_cast<uint64_t>(part.place + begin), room, n);
    return room;
  }
};

// n elements of a part from `begin`, at most a tile; low is where their rounded copy goes, or null. Only bf16 is
// converted in the loop itself: for f16 there is a unit, which works on whole tiles.
template <class Low, class Grad>
void step(const Walk& walk, const typename Grad::Bits* grad, uint16_t* low, int64_t begin, int64_t n) {
  const FlatAdamPart& part = walk.part;
  if constexpr (std::is_same_v<Low, F16>) {
    step<void, Grad>(walk, grad, nullptr, begin, n);
    convert<F32, F16>(static_cast<const float*>(part.master) + begin, low, n);
  } else {
    alignas(cache_line) float room[5][tile];
    alignas(cache_line) uint16_t draws[tile];
    using Seen = std::conditional_t<std::is_same_v<Grad, F16>, F32, Grad>;
    const typename Seen::Bits* g;
    if constexpr (std::is_same_v<Grad, F16>) {
      convert<F16, F32>(grad, room[4], n);
      g = room[4];
    } else {
      g = grad;
    }
    const bool wide = part.master_dtype == Dtype::f32;
    auto* upper = static_cast<uint16_t*>(part.master) + begin;
    float* p = wide ? static_cast<float*>(part.master) + begin : room[0];
    if (part.remainder) {
      join(upper, part.remainder + begin, p, n);
    } else if (!wide) {
      convert<BF16, F32>(upper, p, n);
    }
    float* m = widened<true>(part.exp_avg, part.moment_dtype, begin, n, room[1]);
    float* v = widened<false>(part.exp_avg_sq, part.moment_dtype, begin, n, room[2]);
    float* max_v = nullptr;
    if (walk.group.amsgrad) max_v = widened<false>(part.max_exp_avg_sq, part.moment_dtype, begin, n, room[3]);
    with_flag(walk.group.l2, [&](auto l2) {
      with_flag(walk.group.amsgrad, [&](auto amsgrad) {
        update<Seen, Low, decltype(l2)::value, decltype(amsgrad)::value>(walk.group, walk.scale, p, m, v, max_v, g, low,
                                                                         n);
      });
    });
    if (part.remainder) {
      split(p, upper, part.remainder + begin, n);
    } else if (!wide) {
      round_stochastically(p, upper, walk.draws(part.stream, begin, n, draws), n);
    }
    if (part.moment_dtype != Dtype::f32) {
      rounded<true>(part.exp_avg, part.moment_dtype, begin, n, m, nullptr);
      rounded<false>(part.exp_avg_sq, part.moment_dtype, begin, n, v,
                     walk.draws(part.stream + 0x80000000u, begin, n, draws));
      if (walk.group.amsgrad) rounded<false>(part.max_exp_avg_sq, part.moment_dtype, begin, n, max_v, nullptr);
    }
  }
}

template <class Grad>
void walk_tiles(const Walk& walk, bool streaming, int64_t begin, int64_t end) {
  const FlatAdamPart& part = walk.part;
  const auto* grad = static_cast<const typename Grad::Bits*>(part.grad);
  const auto with_low = [&](auto low) {
    write(static_cast<uint16_t*>(part.low) + begin, end - begin, streaming,
          [&](uint16_t* out, int64_t first, int64_t n) {
            step<decltype(low), Grad>(walk, grad + begin + first, out, begin + first, n);
          });
  };
  if (!part.low) {
    for (int64_t i = begin; i < end; i += tile) {
      step<void, Grad>(walk, grad + i, nullptr, i, std::min(tile, end - i));
    }
  } else if (part.low_dtype == Dtype::bf16) {
    with_low(UpperHalf{});
  } else {
    with_low(F16{});
  }
}

}  // namespace

void flat_adam(const FlatAdamArgs& args, Stream) {
  if (args.skip && *args.skip != 0.0f) return;
  const float grad_scale = args.grad_scale ? *args.grad_scale : 1.0f;
  const bool large = args.total * 2 >= stream_bytes;  // of low, were it everywhere
  for_line(args.parts, args.part_count, args.total, [&](const FlatAdamPart& part, int64_t begin, int64_t end) {
    const FlatAdamGroup group = args.groups[part.group].with_row(args.dynamic);
    const Walk walk{part, group, group.maximize ? -grad_scale : grad_scale, args.seed};
    const bool streaming = large && part.moment_dtype != Dtype::u8;  // whose lines would cut blocks
    with_float(part.grad_dtype, [&](auto grad) { walk_tiles<decltype(grad)>(walk, streaming, begin, end); });
  });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
