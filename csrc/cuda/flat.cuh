// The kernels of core/flat.h's updates. There is one for each way in which masters and moments are stored; whatever else
// differs between parts is asked at run time, where a block's threads give one answer.
//
// An Op has Args, and the formula of element i of a thread's group: the new p, moments in place.
//   static __device__ float update(const Args::Group&, float g, float p, Group<float>* moments, int i)
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "core/codes.h"
#include "core/flat.h"
#include "cuda/access.cuh"
#include "cuda/ops.h"
#include "cuda/random.cuh"

namespace npuzero::cuda {
namespace {

enum class Masters { f32, split, none };

static_assert(row % moment_block == 0 && moment_block % group == 0, "no row cuts a block of codes");
constexpr int block_threads = moment_block / group;  // of a warp, that hold one block of codes

// A part as a kernel is sent it. `beside` is low where masters are f32, the remainder where they are split.
template <int moment_count>
struct Part {
  void *master, *beside, *moments[moment_count];
  const void* grad;
  int64_t count, place;
  uint32_t stream;
  uint8_t group, grad_dtype, low_dtype;
  bool in_accesses;

  Part() = default;
  Part(const FlatPart<moment_count>& part, int group)
      : master(part.master),
        beside(part.remainder ? part.remainder : part.low),
        grad(part.grad),
        count(part.count),
        place(part.place),
        stream(part.stream),
        group(static_cast<uint8_t>(group)),
        grad_dtype(static_cast<uint8_t>(part.grad_dtype)),
        low_dtype(static_cast<uint8_t>(part.low_dtype)),
        in_accesses(accessible(part.master, part.master_dtype) && accessible(beside, Dtype::bf16) &&
                    accessible(grad, part.grad_dtype)) {
    for (int i = 0; i < moment_count; ++i) {
      moments[i] = part.moments[i].values;
      in_accesses = in_accesses && accessible(moments[i], part.moment_dtype);
    }
  }
};

template <int moment_count>
struct PartWithCodes : Part<moment_count> {
  uint8_t* exponents[moment_count];

  PartWithCodes() = default;
  PartWithCodes(const FlatPart<moment_count>& part, int group) : Part<moment_count>(part, group) {
    for (int i = 0; i < moment_count; ++i) exponents[i] = part.moments[i].exponents;
  }
};

template <class Args, Dtype moments>
using PartOf = std::conditional_t<moments == Dtype::u8, PartWithCodes<Args::moment_count>, Part<Args::moment_count>>;

constexpr int most_groups = 32;

// A kernel's parameters.
template <class Args, Dtype moments>
struct Sent {
  using Part = PartOf<Args, moments>;
  static constexpr int capacity =
      (parameter_bytes - 64 - most_groups * static_cast<int>(sizeof(typename Args::Group))) /
      static_cast<int>(sizeof(Part) + sizeof(uint32_t));

  Table<Part, capacity> table;
  typename Args::Group groups[most_groups];
  const float *grad_scale, *skip, *dynamic;
  uint64_t seed;
};

// Calls body(i) for 0 to count - 1, each i a constant of its own type.
template <class Body, int... i>
__device__ void each_constant(std::integer_sequence<int, i...>, const Body& body) {
  (body(std::integral_constant<int, i>{}), ...);
}

// -- moments ----------------------------------------------------------------------------------------------------------

// A group as it lies in memory.
template <Dtype dtype>
struct Stored {
  using Bits =
      std::conditional_t<dtype == Dtype::f32, float, std::conditional_t<dtype == Dtype::bf16, uint16_t, uint8_t>>;
  Group<Bits> bits;
  uint32_t exponent;  // of the block that codes are in

  template <bool whole>
  __device__ void load(const void* values, const uint8_t* exponents, Span span) {
    bits = cuda::load<whole>(static_cast<const Bits*>(values), span);
    if constexpr (dtype == Dtype::u8) exponent = span.has(0) ? exponents[span.first / moment_block] : 0;
  }

  template <bool whole>
  __device__ void store(void* values, uint8_t* exponents, Span span) const {
    cuda::store<whole, Reuse::late>(static_cast<Bits*>(values), span, bits);
    if constexpr (dtype == Dtype::u8) {
      if (span.first % moment_block == 0 && span.has(0)) {
        exponents[span.first / moment_block] = static_cast<uint8_t>(exponent);
      }
    }
  }

  template <bool with_sign>
  __device__ Group<float> widened() const {
    if constexpr (dtype == Dtype::f32) {
      return bits;
    } else if constexpr (dtype == Dtype::bf16) {
      return cuda::widened<BF16>(bits);
    } else {
      Group<float> to;
#pragma unroll
      for (int k = 0; k < group; ++k) to.at[k] = Code<with_sign>::widen(bits.at[k], exponent);
      return to;
    }
  }

  // To nearest where there are no draws.
  template <bool with_sign>
  __device__ void round(const Group<float>& from, Span span, const Draws* draws) {
    if constexpr (dtype == Dtype::f32) {
      bits = from;
    } else if constexpr (dtype == Dtype::bf16) {
      bits = draws ? rounded(from, *draws) : rounded<UpperHalf>(from);
    } else {
      round_codes<with_sign>(from, span, draws);
    }
  }

 private:
  // All threads of a warp come here, whether they have elements or not: those of a block find its exponent together.
  template <bool with_sign>
  __device__ void round_codes(const Group<float>& from, Span span, const Draws* draws) {
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
    exponent = Code<with_sign>::exponent_of(largest);
    const bool finite = exponent != Code<with_sign>::not_finite;
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const uint32_t add = draws ? static_cast<uint32_t>(draws->at[k]) << 3 : 0x40000u;
      bits.at[k] = finite ? Code<with_sign>::round(from.at[k], exponent, add) : 0;
    }
  }
};

// -- the update -------------------------------------------------------------------------------------------------------

// A thread's groups of one row, as they lie in memory.
template <int moment_count, Masters masters, Dtype moment_dtype>
struct Held {
  using Master = std::conditional_t<masters == Masters::f32, float, uint16_t>;
  Group<Master> master;
  Group<uint16_t> beside;
  Stored<moment_dtype> moments[moment_count];

  __device__ Group<float> value() const {
    if constexpr (masters == Masters::f32) {
      return master;
    } else if constexpr (masters == Masters::none) {
      return widened<BF16>(master);
    } else {
      Group<float> p;
#pragma unroll
      for (int k = 0; k < group; ++k) p.at[k] = UpperHalf::join(master.at[k], static_cast<int16_t>(beside.at[k]));
      return p;
    }
  }

  __device__ void round(const Group<float>& p, Dtype low, const Draws& draws) {
    if constexpr (masters == Masters::f32) {
      master = p;
      beside = low == Dtype::bf16 ? rounded<UpperHalf>(p) : rounded<F16>(p);
    } else if constexpr (masters == Masters::none) {
      master = rounded(p, draws);
    } else {
      master = rounded<UpperHalf>(p);
#pragma unroll
      for (int k = 0; k < group; ++k) beside.at[k] = static_cast<uint16_t>(UpperHalf::remainder(p.at[k]));
    }
  }
};

// A block's row of a part, from `start.first` on in this thread.
template <class Op, Masters masters, Dtype dtype>
__device__ void update(const PartOf<typename Op::Args, dtype>& part, const typename Op::Args::Group& k, float scale,
                       Span start, bool whole, const Drawing& drawing) {
  using Args = typename Op::Args;
  constexpr int n = Args::moment_count;
  using Held = Held<n, masters, dtype>;
  const auto each_moment = [&](const auto& body) {
    each_constant(std::make_integer_sequence<int, n>{}, [&](auto i) {
      if (i < k.used()) body(i);
    });
  };
  const auto exponents = [&](int i) -> uint8_t* {
    if constexpr (dtype == Dtype::u8) return part.exponents[i];
    return nullptr;
  };
  auto* master = static_cast<typename Held::Master*>(part.master);
  auto* beside = static_cast<uint16_t*>(part.beside);
  const auto grad_dtype = static_cast<Dtype>(part.grad_dtype);
  Held held;
  Raw grad[1];
  with_access(whole, [&](auto access) {
    load<access.value>(grad, part.grad, grad_dtype, start);
    held.master = load<access.value>(master, start);
    if constexpr (masters == Masters::split) held.beside = load<access.value>(beside, start);
    each_moment([&](auto i) { held.moments[i].template load<access.value>(part.moments[i], exponents(i), start); });
  });
  widen(grad, grad_dtype);
  Group<float> p = held.value(), moments[n];
  each_moment([&](auto i) { moments[i] = held.moments[i].template widened<Args::kinds[i].with_sign>(); });
#pragma unroll
  for (int i = 0; i < group; ++i) p.at[i] = Op::update(k, grad[0].wide.at[i] * scale, p.at[i], moments, i);
  const int at = static_cast<int>(start.first % chunk);
  Draws of_master = {}, of_moments = {};
  if constexpr (masters == Masters::none) of_master = drawing(at);
  if constexpr (dtype != Dtype::f32) of_moments = drawing(at, true);
  held.round(p, static_cast<Dtype>(part.low_dtype), of_master);
  each_moment([&](auto i) {
    constexpr MomentKind kind = Args::kinds[i];
    const Draws* draws = dtype != Dtype::f32 && kind.by_chance ? &of_moments : nullptr;
    held.moments[i].template round<kind.with_sign>(moments[i], start, draws);
  });
  with_access(whole, [&](auto access) {
    store<access.value, Reuse::late>(master, start, held.master);
    if (masters == Masters::split || (masters == Masters::f32 && beside)) {
      store<access.value>(beside, start, held.beside);
    }
    each_moment([&](auto i) { held.moments[i].template store<access.value>(part.moments[i], exponents(i), start); });
  });
}

// Whether no element needs what its neighbours have: draws, or the exponent of a block.
template <Masters masters, Dtype moments>
constexpr bool alone = masters != Masters::none && moments == Dtype::f32;

// Blocks that a processor shall hold at least, which says how many registers there are: as many as spill none of them.
template <Masters masters, Dtype moments>
constexpr int least_blocks = alone<masters, moments> ? 4 : 3;

template <class Op, Masters masters, Dtype moments>
__global__ void __launch_bounds__(threads, least_blocks<masters, moments>)
    update_parts(const __grid_constant__ Sent<typename Op::Args, moments> sent) {
  if (sent.skip && *sent.skip != 0.0f) return;
  const float grad_scale = sent.grad_scale ? *sent.grad_scale : 1.0f;
  const uint32_t* columns = nullptr;
  if constexpr (!alone<masters, moments>) columns = shared_columns(sent.seed);
  for_chunks(sent.table, [&](const auto& part, int64_t begin) {
    const auto group = sent.groups[part.group].with_row(sent.dynamic);
    const float scale = group.maximize ? -grad_scale : grad_scale;
    const bool whole = part.in_accesses && begin + chunk <= part.count;
    Span span = whole || !alone<masters, moments> ? together(begin, part.count) : side_by_side(begin, part.count);
    const Drawing drawing(columns, part.place + begin, part.stream, group.step, sent.seed);
#pragma unroll 1
    for (int u = 0; u < rows; ++u, span.first += row) {
      update<Op, masters, moments>(part, group, scale, span, whole, drawing);
    }
  });
}

// -- the host's side --------------------------------------------------------------------------------------------------

template <class FlatPart>
Masters masters_of(const FlatPart& part) {
  if (part.master_dtype == Dtype::f32) return Masters::f32;
  return part.remainder ? Masters::split : Masters::none;
}

// Launches for parts `first` to `last`, which are stored alike: as few as their tables need.
template <class Op, Masters masters, Dtype moments>
void run(const typename Op::Args& args, int64_t first, int64_t last, Stream stream) {
  using Args = typename Op::Args;
  Sent<Args, moments> sent;
  sent.grad_scale = args.grad_scale, sent.skip = args.skip, sent.dynamic = args.dynamic, sent.seed = args.seed;
  int64_t group_of[most_groups];  // the number in args of each group in `sent`
  int groups = 0;
  const auto flush = [&] {
    if (sent.table.chunks() > 0) {
      launch_over<update_parts<Op, masters, moments>>(Args::op, sent.table.chunks(), stream, sent);
    }
    sent.table.count = 0;
    groups = 0;
  };
  const auto add = [&](const typename Args::Part& part) {
    const int group = static_cast<int>(std::find(group_of, group_of + groups, part.group) - group_of);
    if (group == most_groups || !sent.table.add(PartOf<Args, moments>(part, group), part.count)) return false;
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

template <class Op, Masters masters>
void run(const typename Op::Args& args, int64_t first, int64_t last, Stream stream) {
  switch (args.parts[first].moment_dtype) {
    case Dtype::f32: return run<Op, masters, Dtype::f32>(args, first, last, stream);
    case Dtype::bf16: return run<Op, masters, Dtype::bf16>(args, first, last, stream);
    default: return run<Op, masters, Dtype::u8>(args, first, last, stream);
  }
}

// One launch of an op, or a few.
template <class Op>
void run(const typename Op::Args& args, Stream stream) {
  const auto alike = [&](int64_t i, int64_t j) {
    return masters_of(args.parts[i]) == masters_of(args.parts[j]) &&
           args.parts[i].moment_dtype == args.parts[j].moment_dtype;
  };
  for (int64_t first = 0, last; first < args.part_count; first = last) {
    for (last = first + 1; last < args.part_count && alike(first, last);) ++last;
    switch (masters_of(args.parts[first])) {
      case Masters::f32: run<Op, Masters::f32>(args, first, last, stream); break;
      case Masters::split: run<Op, Masters::split>(args, first, last, stream); break;
      case Masters::none: run<Op, Masters::none>(args, first, last, stream); break;
    }
  }
}

}  // namespace
}  // namespace npuzero::cuda
