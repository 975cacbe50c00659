// Writing results tile by tile, and past the caches where nobody reads them soon: memory that is written whole need not
// be read first. Only for results apart from what is read; in place it would write to memory what is in the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/numeric.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

constexpr int64_t tile = 1024;  // elements; what a kernel holds of one stays in the first-level cache
constexpr int64_t cache_line = 64;

// Bytes that one launch writes, from which on streaming pays: less may be found in the last cache by the next reader.
constexpr int64_t stream_bytes = 16 << 20;

#if defined(__x86_64__)
// Whole lines, `to` at the start of one.
inline void stream_lines(void* to, const void* from, int64_t bytes) {
#if defined(__AVX512F__)
  using Vector = __m512i;
  const auto store = [](Vector* at, Vector value) { _mm512_stream_si512(at, value); };
#elif defined(__AVX2__)
  using Vector = __m256i;
  const auto store = [](Vector* at, Vector value) { _mm256_stream_si256(at, value); };
#else
  using Vector = __m128i;
  const auto store = [](Vector* at, Vector value) { _mm_stream_si128(at, value); };
#endif
  auto* out = static_cast<Vector*>(to);
  const auto* in = static_cast<const Vector*>(from);
  for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(Vector)); ++i) store(out + i, in[i]);
}
// Streamed writes obey no other order.
inline void finish_streams() { _mm_sfence(); }
#else
inline void stream_lines(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, bytes); }
inline void finish_streams() {}
#endif

// Calls fill(out, begin, count) for all of target[0, n), at most a tile at a time; what it leaves in out[0, count) is
// target[begin, begin + count).
template <class Bits, class Fill>
inline void write(Bits* target, int64_t n, bool streaming, const Fill& fill) {
  constexpr int64_t line = cache_line / sizeof(Bits);
  int64_t i = 0;
  if (streaming) {
    alignas(cache_line) Bits buffer[tile];
    const int64_t lead = -reinterpret_cast<uintptr_t>(target) % cache_line / sizeof(Bits);
    i = std::min(n, lead);
    fill(target, 0, i);
    while (n - i >= line) {
      const int64_t count = std::min(tile, (n - i) / line * line);
      fill(buffer, i, count);
      stream_lines(target + i, buffer, count * sizeof(Bits));
      i += count;
    }
  }
  for (; i < n; i += tile) fill(target + i, i, std::min(tile, n - i));
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
