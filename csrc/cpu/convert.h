// Loops over elements of two dtypes, shared by cast, pack and the updates.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numeric.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

#ifdef __F16C__
// The conversion unit's rounding is F16::round and F16::widen. Each does as many whole vectors as n holds and returns
// the elements done; other pairs of types do none.
template <class Source, class Target>
inline int64_t convert_vectors(const typename Source::Bits* source, typename Target::Bits* target, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<Source, F32> && std::is_same_v<Target, F16>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
    }
  }
  if constexpr (std::is_same_v<Source, F16> && std::is_same_v<Target, F32>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm256_storeu_ps(target + i, _mm256_cvtph_ps(half));
    }
  }
  return i;
}
#else
template <class Source, class Target>
inline int64_t convert_vectors(const typename Source::Bits*, typename Target::Bits*, int64_t) {
  return 0;
}
#endif

// target = round(f32(source)); equal dtypes copy the bits
template <class Source, class Target>
inline void convert(const typename Source::Bits* __restrict source, typename Target::Bits* __restrict target,
                    int64_t n) {
  if constexpr (std::is_same_v<Source, Target>) {
    std::memcpy(target, source, n * sizeof(*source));
  } else {
    const int64_t done = convert_vectors<Source, Target>(source, target, n);
#pragma omp simd
    for (int64_t i = done; i < n; ++i) target[i] = Target::round(Source::widen(source[i]));
  }
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
