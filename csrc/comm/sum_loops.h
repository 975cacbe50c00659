// The loops behind sum(), compiled once per instruction set: NPUZERO_ISA names the namespace. See sum.h.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/numeric.h"

namespace npuzero::comm {
inline namespace NPUZERO_ISA {

constexpr size_t lanes = 32;  // elements summed at a time, in registers; whole cache lines of any 2-byte result
constexpr size_t line = 64;

// What has no rounding of its own: summed as it is. Integers are summed unsigned, where wrapping around is defined.
template <class T>
struct Plain {
  using Bits = T;
  static T widen(T x) { return x; }
  static T round(T x) { return x; }
};

template <class Type, class Wide>
inline void widen(const typename Type::Bits* from, Wide* to) {
#pragma omp simd
  for (size_t i = 0; i < lanes; ++i) to[i] = Type::widen(from[i]);
}

template <class Type, class Wide>
inline void round(const Wide* from, typename Type::Bits* to) {
#pragma omp simd
  for (size_t i = 0; i < lanes; ++i) to[i] = Type::round(from[i]);
}

#if defined(NPUZERO_SUM_F16C)
// The conversion unit rounds as F16::round and widens as F16::widen, in a fraction of the time.
template <>
inline void widen<F16>(const uint16_t* from, float* to) {
  for (size_t i = 0; i < lanes; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
}

template <>
inline void round<F16>(const float* from, uint16_t* to) {
  for (size_t i = 0; i < lanes; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
}
#endif

// Past the caches, where the instruction set can; both ends on cache lines. In the order of nothing else: see finish.
template <size_t bytes>
inline void stream(void* to, const void* from) {
#if defined(__x86_64__)
  for (size_t at = 0; at < bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + at)));
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void finish_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class Wire, class Result>
void sum_of(void* out, const void* const* in, int inputs, size_t n, bool accumulate, bool streaming) {
  using Bits = typename Wire::Bits;
  using Wide = decltype(Wire::widen({}));
  auto* to = static_cast<typename Result::Bits*>(out);
  const auto input = [in](int k, size_t i) { return static_cast<const Bits*>(in[k]) + i; };
  const auto one = [&](size_t i) {
    Wide total = Wire::widen(*input(0, i));
    for (int k = 1; k < inputs; ++k) total += Wire::widen(*input(k, i));
    to[i] = Result::round(accumulate ? Result::widen(to[i]) + total : total);
  };
  size_t i = 0;
  for (const size_t head = -reinterpret_cast<uintptr_t>(out) % line / sizeof *to; streaming && i < std::min(head, n);
       ++i) {
    one(i);
  }
  for (; i + lanes <= n; i += lanes) {
    alignas(line) Wide total[lanes], next[lanes];
    alignas(line) typename Result::Bits rounded[lanes];
    const auto add = [&] {
#pragma omp simd
      for (size_t j = 0; j < lanes; ++j) total[j] += next[j];
    };
    widen<Wire>(input(0, i), total);
    for (int k = 1; k < inputs; ++k) {
      widen<Wire>(input(k, i), next);
      add();
    }
    if (accumulate) {
      widen<Result>(to + i, next);
      add();
    }
    round<Result>(total, streaming ? rounded : to + i);
    if (streaming) stream<sizeof rounded>(to + i, rounded);
  }
  if (streaming) finish_stream();
  for (; i < n; ++i) one(i);
}

inline void sum_loops(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n, bool accumulate,
                      bool streaming) {
  const auto floats = [&](auto type) {
    using Wire = decltype(type);
    const auto sum = result == wire ? sum_of<Wire, Wire> : sum_of<Wire, F32>;
    sum(out, in, inputs, n, accumulate, streaming);
  };
  const auto plain = [&](auto type) {
    using Same = Plain<decltype(type)>;
    sum_of<Same, Same>(out, in, inputs, n, accumulate, streaming);
  };
  switch (wire) {
    case Dtype::f32: return floats(F32{});
    case Dtype::bf16: return floats(BF16{});
    case Dtype::f16: return floats(F16{});
    case Dtype::f64: return plain(double{});
    case Dtype::i32: return plain(uint32_t{});
    case Dtype::i64: return plain(uint64_t{});
    case Dtype::u8: return plain(uint8_t{});
    case Dtype::i16: return plain(uint16_t{});
  }
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::comm
