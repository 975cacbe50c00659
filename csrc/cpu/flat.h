// The walk of core/flat.h's updates. A part is walked in tiles that fit the first-level cache: what is not stored in f32
// is widened into buffers, an op's formula runs in f32, and its results are rounded while they are still near.
//
// An Op has Args, and the formula as its loop over n elements, moments in f32:
//   template <class Grad, class Low>
//   static void update(const Args::Group&, float scale, float* p, float* const* moments, const Grad::Bits* grad,
//                      uint16_t* low, int64_t n)
// Grad is F32 or BF16; Low is UpperHalf, or void where there is nothing to write.
#pragma once

#include <utility>

#include "core/flat.h"
#include "cpu/blocks.h"
#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "cpu/random.h"
#include "cpu/write.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

static_assert(chunk_multiple % moment_block == 0 && tile % moment_block == 0, "nothing cuts a block");

inline void join(const uint16_t* __restrict upper, const int16_t* __restrict remainder, float* __restrict p,
                 int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) p[i] = UpperHalf::join(upper[i], remainder[i]);
}

inline void split(const float* __restrict p, uint16_t* __restrict upper, int16_t* __restrict remainder, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    upper[i] = UpperHalf::round(p[i]);
    remainder[i] = UpperHalf::remainder(p[i]);
  }
}

inline void round_stochastically(const float* __restrict x, uint16_t* __restrict out, const uint16_t* __restrict random,
                                 int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = round_stochastic(x[i], random[i]);
}

// Calls body(code, its exponent, first element, elements) for the blocks of n elements from `begin`.
template <class Body>
inline void each_block(const Moment& moment, int64_t begin, int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += moment_block) {
    body(static_cast<uint8_t*>(moment.values) + begin + i, moment.exponents[(begin + i) / moment_block], i,
         std::min(moment_block, n - i));
  }
}

// A moment of n elements from `begin` in f32: memory itself where it is that, else `room`. This, `rounded` and the draws
// are functions of their own: in one with all of a tile's loops gcc forgets which pointers are restricted, which costs a
// fifth of the time.
template <bool with_sign>
[[gnu::noinline]] float* widened(const Moment& moment, Dtype dtype, int64_t begin, int64_t n, float* room) {
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
[[gnu::noinline]] void rounded(const Moment& moment, Dtype dtype, int64_t begin, int64_t n, const float* room,
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
inline void with_flag(bool flag, const Body& body) {
  flag ? body(std::true_type{}) : body(std::false_type{});
}

// Calls body(i) for 0 to count - 1, each i a constant of its own type.
template <class Body, int... i>
inline void each_constant(std::integer_sequence<int, i...>, const Body& body) {
  (body(std::integral_constant<int, i>{}), ...);
}

// A part with its group's coefficients: what the walk carries along.
template <class Op>
struct Walk {
  using Args = typename Op::Args;
  const typename Args::Part& part;
  const typename Args::Group group;
  float scale;
  uint64_t seed;

  [[gnu::noinline]] const uint16_t* draws(uint32_t stream, int64_t begin, int64_t n, uint16_t* room) const {
    Draws{seed, stream, group.step}.make(static_cast<uint64_t>(part.place + begin), room, n);
    return room;
  }

  // Calls body(i) for the moments that the group uses.
  template <class Body>
  void each_moment(const Body& body) const {
    each_constant(std::make_integer_sequence<int, Args::moment_count>{}, [&](auto i) {
      if (i < group.used()) body(i);
    });
  }
};

// n elements of a part from `begin`, at most a tile; low is where their rounded copy goes, or null. Only bf16 is
// converted in the formula's loop itself: for f16 there is a unit, which works on whole tiles.
template <class Op, class Low, class Grad>
inline void step(const Walk<Op>& walk, const typename Grad::Bits* grad, uint16_t* low, int64_t begin, int64_t n) {
  using Args = typename Op::Args;
  const auto& part = walk.part;
  if constexpr (std::is_same_v<Low, F16>) {
    step<Op, void, Grad>(walk, grad, nullptr, begin, n);
    convert<F32, F16>(static_cast<const float*>(part.master) + begin, low, n);
  } else {
    alignas(cache_line) float room[2 + Args::moment_count][tile];  // of p, the gradient, moments
    alignas(cache_line) uint16_t draws[tile];
    using Seen = std::conditional_t<std::is_same_v<Grad, F16>, F32, Grad>;
    const typename Seen::Bits* g;
    if constexpr (std::is_same_v<Grad, F16>) {
      convert<F16, F32>(grad, room[1], n);
      g = room[1];
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
    float* moments[Args::moment_count] = {};
    walk.each_moment([&](auto i) {
      moments[i] = widened<Args::kinds[i].with_sign>(part.moments[i], part.moment_dtype, begin, n, room[2 + i]);
    });
    Op::template update<Seen, Low>(walk.group, walk.scale, p, moments, g, low, n);
    if (part.remainder) {
      split(p, upper, part.remainder + begin, n);
    } else if (!wide) {
      round_stochastically(p, upper, walk.draws(part.stream, begin, n, draws), n);
    }
    if (part.moment_dtype == Dtype::f32) return;
    walk.each_moment([&](auto i) {
      constexpr MomentKind kind = Args::kinds[i];
      const uint16_t* random = nullptr;
      if constexpr (kind.by_chance) random = walk.draws(part.stream + moment_stream, begin, n, draws);
      rounded<kind.with_sign>(part.moments[i], part.moment_dtype, begin, n, moments[i], random);
    });
  }
}

template <class Op, class Grad>
inline void walk_tiles(const Walk<Op>& walk, bool streaming, int64_t begin, int64_t end) {
  const auto& part = walk.part;
  const auto* grad = static_cast<const typename Grad::Bits*>(part.grad);
  const auto with_low = [&](auto low) {
    write(static_cast<uint16_t*>(part.low) + begin, end - begin, streaming,
          [&](uint16_t* out, int64_t first, int64_t n) {
            step<Op, decltype(low), Grad>(walk, grad + begin + first, out, begin + first, n);
          });
  };
  if (!part.low) {
    for (int64_t i = begin; i < end; i += tile) {
      step<Op, void, Grad>(walk, grad + i, nullptr, i, std::min(tile, end - i));
    }
  } else if (part.low_dtype == Dtype::bf16) {
    with_low(UpperHalf{});
  } else {
    with_low(F16{});
  }
}

// One launch of an op.
template <class Op>
inline void update_parts(const typename Op::Args& args) {
  if (args.skip && *args.skip != 0.0f) return;
  const float grad_scale = args.grad_scale ? *args.grad_scale : 1.0f;
  const bool large = args.total * 2 >= stream_bytes;  // of low, were it everywhere
  for_line(args.parts, args.part_count, args.total, [&](const auto& part, int64_t begin, int64_t end) {
    const auto group = args.groups[part.group].with_row(args.dynamic);
    const Walk<Op> walk{part, group, group.maximize ? -grad_scale : grad_scale, args.seed};
    const bool streaming = large && part.moment_dtype != Dtype::u8;  // whose lines would cut blocks
    with_float(part.grad_dtype, [&](auto grad) { walk_tiles<Op, decltype(grad)>(walk, streaming, begin, end); });
  });
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
