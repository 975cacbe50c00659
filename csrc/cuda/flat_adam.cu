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

static_assert(row % moment_block == 0 && moment_block % group == 0, "no row cuts a block of codes");
constexpr int block_threads = moment_block / group;  // of a warp, that hold one block of codes

// A part as a kernel is sent it. `beside` is low where masters are f32, the remainder where they are split.
struct Part {
  void *master, *beside, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  const void* grad;
  int64_t count, place;
  uint32_t stream;
  uint8_t group, grad_dtype, low_dtype;
  bool in_accesses;

  Part() = default;
  Part(const FlatAdamPart& part, int group)
      : master(part.master),
        beside(part.remainder ? part.remainder : part.low),
        exp_avg(part.moments[0].values),
        exp_avg_sq(part.moments[1].values),
        max_exp_avg_sq(part.moments[2].values),
        grad(part.grad),
        count(part.count),
        place(part.place),
        stream(part.stream),
        group(static_cast<uint8_t>(group)),
        grad_dtype(static_cast<uint8_t>(part.grad_dtype)),
        low_dtype(static_cast<uint8_t>(part.low_dtype)),
        in_accesses(accessible(part.master, part.master_dtype) && accessible(beside, Dtype::bf16) &&
                    accessible(exp_avg, part.moment_dtype) && accessible(exp_avg_sq, part.moment_dtype) &&
                    accessible(max_exp_avg_sq, part.moment_dtype) && accessible(grad, part.grad_dtype)) {}
};

struct PartWithCodes : Part {
  uint8_t *exp_avg_exponents, *exp_avg_sq_exponents, *max_exp_avg_sq_exponents;

  PartWithCodes() = default;
  PartWithCodes(const FlatAdamPart& part, int group)
      : Part(part, group),
        exp_avg_exponents(part.moments[0].exponents),
        exp_avg_sq_exponents(part.moments[1].exponents),
        max_exp_avg_sq_exponents(part.moments[2].exponents) {}
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

// A group as it lies in memory.
template <Dtype dtype>
struct Moment {
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

__device__ float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

// A thread's groups of one row, as they lie in memory.
template <Masters masters, Dtype moments>
struct Held {
  using Master = std::conditional_t<masters == Masters::f32, float, uint16_t>;
  Group<Master> master;
  Group<uint16_t> beside;
  Moment<moments> m, v, max_v;

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
template <Masters masters, Dtype moments>
__device__ void update(const PartOf<moments>& part, const FlatAdamGroup& k, float scale, Span start, bool whole,
                       const Drawing& drawing) {
  using Held = Held<masters, moments>;
  uint8_t *m_exponents = nullptr, *v_exponents = nullptr, *max_v_exponents = nullptr;
  if constexpr (moments == Dtype::u8) {
    m_exponents = part.exp_avg_exponents, v_exponents = part.exp_avg_sq_exponents;
    max_v_exponents = part.max_exp_avg_sq_exponents;
  }
  auto* master = static_cast<typename Held::Master*>(part.master);
  auto* beside = static_cast<uint16_t*>(part.beside);
  const auto grad_dtype = static_cast<Dtype>(part.grad_dtype);
  Held held;
  Raw grad[1];
  with_access(whole, [&](auto access) {
    load<access.value>(grad, part.grad, grad_dtype, start);
    held.master = load<access.value>(master, start);
    if constexpr (masters == Masters::split) held.beside = load<access.value>(beside, start);
    held.m.template load<access.value>(part.exp_avg, m_exponents, start);
    held.v.template load<access.value>(part.exp_avg_sq, v_exponents, start);
    if (k.amsgrad) held.max_v.template load<access.value>(part.max_exp_avg_sq, max_v_exponents, start);
  });
  widen(grad, grad_dtype);
  Group<float> p = held.value(), m = held.m.template widened<true>(), v = held.v.template widened<false>();
  Group<float> max_v;
  if (k.amsgrad) max_v = held.max_v.template widened<false>();
#pragma unroll
  for (int i = 0; i < group; ++i) {
    float g = grad[0].wide.at[i] * scale;
    if (k.l2) g = g + k.weight_decay * p.at[i];
    const float decayed = p.at[i] * k.decay;
    m.at[i] = k.beta1 * m.at[i] + k.one_minus_beta1 * g;
    v.at[i] = k.beta2 * v.at[i] + (k.one_minus_beta2 * g) * g;
    float x = v.at[i];
    if (k.amsgrad) x = max_v.at[i] = max_or_nan(max_v.at[i], x);
    p.at[i] = decayed - (k.step_size * m.at[i]) / (sqrtf(x) / k.bias2_sqrt + k.eps);
  }
  const int at = static_cast<int>(start.first % chunk);
  Draws of_master = {}, of_v = {};
  if constexpr (masters == Masters::none) of_master = drawing(at);
  if constexpr (moments != Dtype::f32) of_v = drawing(at, true);
  held.round(p, static_cast<Dtype>(part.low_dtype), of_master);
  held.m.template round<true>(m, start, nullptr);
  held.v.template round<false>(v, start, moments == Dtype::f32 ? nullptr : &of_v);
  if (k.amsgrad) held.max_v.template round<false>(max_v, start, nullptr);
  with_access(whole, [&](auto access) {
    store<access.value, Reuse::late>(master, start, held.master);
    if (masters == Masters::split || (masters == Masters::f32 && beside)) {
      store<access.value>(beside, start, held.beside);
    }
    held.m.template store<access.value>(part.exp_avg, m_exponents, start);
    held.v.template store<access.value>(part.exp_avg_sq, v_exponents, start);
    if (k.amsgrad) held.max_v.template store<access.value>(part.max_exp_avg_sq, max_v_exponents, start);
  });
}

// Whether no element needs what its neighbours have: draws, or the exponent of a block.
template <Masters masters, Dtype moments>
constexpr bool alone = masters != Masters::none && moments == Dtype::f32;

// Blocks that a processor shall hold at least, which says how many registers there are: as many as spill none of them.
template <Masters masters, Dtype moments>
constexpr int least_blocks = alone<masters, moments> ? 4 : 3;

template <Masters masters, Dtype moments>
__global__ void __launch_bounds__(threads, least_blocks<masters, moments>)
    update_parts(const __grid_constant__ Sent<moments> sent) {
  if (sent.skip && *sent.skip != 0.0f) return;
  const float grad_scale = sent.grad_scale ? *sent.grad_scale : 1.0f;
  const uint32_t* columns = nullptr;
  if constexpr (!alone<masters, moments>) columns = shared_columns(sent.seed);
  for_chunks(sent.table, [&](const PartOf<moments>& part, int64_t begin) {
    const FlatAdamGroup group = sent.groups[part.group].with_row(sent.dynamic);
    const float scale = group.maximize ? -grad_scale : grad_scale;
    const bool whole = part.in_accesses && begin + chunk <= part.count;
    Span span = whole || !alone<masters, moments> ? together(begin, part.count) : side_by_side(begin, part.count);
    const Drawing drawing(columns, part.place + begin, part.stream, group.step, sent.seed);
#pragma unroll 1
    for (int u = 0; u < rows; ++u, span.first += row) {
      update<masters, moments>(part, group, scale, span, whole, drawing);
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
      launch_over<update_parts<masters, moments>>(FlatAdamArgs::op, sent.table.chunks(), stream, sent);
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
