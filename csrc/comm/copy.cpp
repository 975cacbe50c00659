#include "comm/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace npuzero::comm {

#if defined(__x86_64__)
void copy(void* to, const void* from, size_t bytes, bool streaming) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  // Whole cache lines are streamed; the ends, and what is not streamed, are copied.
  const size_t head = streaming ? std::min(bytes, -reinterpret_cast<uintptr_t>(to) % 64) : bytes;
  std::memcpy(out, in, head);
  size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    for (size_t part = 0; part < 64; part += 16) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at + part), value);
    }
  }
  std::memcpy(out + at, in + at, bytes - at);
  if (streaming) _mm_sfence();  // streamed writes obey no other order
}
#else
void copy(void* to, const void* from, size_t bytes, bool) { std::memcpy(to, from, bytes); }
#endif

}  // namespace npuzero::comm
