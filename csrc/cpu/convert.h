// Loops over elements of two dtypes, shared by cast, pack and flat_adam.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numeric.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// target = round(f32(source)); equal dtypes copy the bits
template <class Source, class Target>
inline void convert(const typename Source::Bits* __restrict source, typename Target::Bits* __restrict target,
                    int64_t n) {
  if constexpr (std::is_same_v<Source, Target>) {
    std::memcpy(target, source, n * sizeof(*source));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) target[i] = Target::round(Source::widen(source[i]));
  }
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
