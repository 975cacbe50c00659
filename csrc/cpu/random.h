// Philox4x32-10 for stochastic rounding: the draws of ops/cast.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/numeric.h"
#include "cpu/write.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// What a draw depends on, beside the element's place.
struct Draws {
  uint64_t seed;
  uint32_t stream, step;  // the counter's words 2 and 3

  static constexpr int64_t each = 8;  // elements that one block serves, 16 bits each
  static constexpr int64_t blocks = tile / each + 1;

  // The elements' bits from `place` on, for a tile at most, somewhere in `halves`.
  const uint16_t* from(uint64_t place, uint16_t* halves) const {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a word comes first");
    uint32_t words[4 * blocks];
    philox(place / each, words);
    std::memcpy(halves, words, sizeof words);
    return halves + place % each;
  }

 private:
  // The four words of the counters first, first + 1, ..., one after the other.
  void philox(uint64_t first, uint32_t* __restrict words) const {
    const Draws self = *this;
#pragma omp simd
    for (int64_t i = 0; i < blocks; ++i) {
      const uint64_t counter = first + static_cast<uint64_t>(i);
      uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
      uint32_t c2 = self.stream, c3 = self.step;
      uint32_t k0 = static_cast<uint32_t>(self.seed), k1 = static_cast<uint32_t>(self.seed >> 32);
      for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      words[4 * i] = c0;
      words[4 * i + 1] = c1;
      words[4 * i + 2] = c2;
      words[4 * i + 3] = c3;
    }
  }
};

using Halves = uint16_t[Draws::each * Draws::blocks];

// f32 to bf16, away from zero with the probability that the dropped bits give.
inline uint16_t round_stochastic(float x, uint16_t random) {
  const uint32_t u = bits_of(x);
  const bool special = (u & 0x7f800000u) == 0x7f800000u;
  return special ? BF16::round(x) : static_cast<uint16_t>((u + random) >> 16);
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
