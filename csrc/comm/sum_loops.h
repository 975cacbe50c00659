// The loops behind sum(), compiled once per instruction set: NPUZERO_ISA names the namespace. See sum.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/numeric.h"

namespace npuzero::comm {
inline namespace NPUZERO_ISA {

// What has no rounding of its own: summed as it is. Integers are summed unsigned, where wrapping around is defined.
template <class T>
struct Plain {
  using Bits = T;
  static T widen(T x) { return x; }
  static T round(T x) { return x; }
};

// The last pass, which rounds: out = sum, or out + sum, where sum(i) is the sum of element i.
template <class Result, class Sum>
void store(typename Result::Bits* out, Sum sum, size_t count, bool accumulate) {
  if (accumulate) {
#pragma omp simd
    for (size_t i = 0; i < count; ++i) out[i] = Result::round(Result::widen(out[i]) + sum(i));
  } else {
#pragma omp simd
    for (size_t i = 0; i < count; ++i) out[i] = Result::round(sum(i));
  }
}

template <class Wire, class Result>
void sum_of(void* out, const void* const* in, int inputs, size_t n, bool accumulate) {
  using Bits = typename Wire::Bits;
  const auto input = [in](int k, size_t begin) { return static_cast<const Bits*>(in[k]) + begin; };
  auto* to = static_cast<typename Result::Bits*>(out);
  if (inputs == 1) return store<Result>(to, [a = input(0, 0)](size_t i) { return Wire::widen(a[i]); }, n, accumulate);
  if (inputs == 2) {
    const auto pair = [a = input(0, 0), b = input(1, 0)](size_t i) { return Wire::widen(a[i]) + Wire::widen(b[i]); };
    return store<Result>(to, pair, n, accumulate);
  }
  constexpr size_t block = 1024;  // the running sum stays in the first-level cache
  alignas(64) decltype(Wire::widen({})) total[block];
  for (size_t begin = 0; begin < n; begin += block) {
    const size_t count = std::min(block, n - begin);
    const Bits *a = input(0, begin), *b = input(1, begin), *last = input(inputs - 1, begin);
#pragma omp simd
    for (size_t i = 0; i < count; ++i) total[i] = Wire::widen(a[i]) + Wire::widen(b[i]);
    for (int k = 2; k < inputs - 1; ++k) {
      const Bits* next = input(k, begin);
#pragma omp simd
      for (size_t i = 0; i < count; ++i) total[i] += Wire::widen(next[i]);
    }
    store<Result>(to + begin, [&total, last](size_t i) { return total[i] + Wire::widen(last[i]); }, count, accumulate);
  }
}

inline void sum_loops(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n,
                      bool accumulate) {
  const auto floats = [&](auto type) {
    using Wire = decltype(type);
    const auto sum = result == wire ? sum_of<Wire, Wire> : sum_of<Wire, F32>;
    sum(out, in, inputs, n, accumulate);
  };
  switch (wire) {
    case Dtype::f32: return floats(F32{});
    case Dtype::bf16: return floats(BF16{});
    case Dtype::f16: return floats(F16{});
    case Dtype::f64: return sum_of<Plain<double>, Plain<double>>(out, in, inputs, n, accumulate);
    case Dtype::i32: return sum_of<Plain<uint32_t>, Plain<uint32_t>>(out, in, inputs, n, accumulate);
    case Dtype::i64: return sum_of<Plain<uint64_t>, Plain<uint64_t>>(out, in, inputs, n, accumulate);
    case Dtype::u8: return sum_of<Plain<uint8_t>, Plain<uint8_t>>(out, in, inputs, n, accumulate);
  }
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::comm
