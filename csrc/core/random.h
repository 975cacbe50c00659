// Philox4x32-10, the draws that ops/cast.h makes of it, and the rounding that they are for.
#pragma once

#include "core/numeric.h"

namespace npuzero {
inline namespace NPUZERO_ISA {

// The four words of the counter (low, high, c2, c3), low and high being those of `counter`, under the key `seed`.
NPUZERO_INLINE void philox(uint64_t counter, uint32_t c2, uint32_t c3, uint64_t seed, uint32_t* words) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

constexpr int draw_columns = 2048;  // elements of a row of draws

// The words of columns 4 * i to 4 * i + 3.
NPUZERO_INLINE void column_words(uint32_t i, uint64_t seed, uint32_t* words) {
  philox(static_cast<uint64_t>(i) | 0xffffffff00000000u, 0, 0, seed, words);
}

NPUZERO_INLINE uint32_t row_word(uint64_t row, uint32_t stream, uint32_t step, uint64_t seed) {
  uint32_t words[4];
  philox(row / 4, stream, step, seed, words);
  const uint32_t first = row % 2 ? words[1] : words[0],
                 second = row % 2 ? words[3] : words[2];  // no address: registers
  return row % 4 < 2 ? first : second;
}

// What a column's or a row's word brings to its draws: 16 bits that are added, and others that are added and squared.
struct DrawShare {
  uint16_t added, squared;

  NPUZERO_INLINE static DrawShare of_column(uint32_t word) {
    return {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 17)};
  }
  NPUZERO_INLINE static DrawShare of_row(uint32_t word) {
    return {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 19)};
  }
};

NPUZERO_INLINE uint16_t draw(DrawShare column, DrawShare row) {
  const uint16_t sum = static_cast<uint16_t>(column.squared + row.squared);  // less than 40960
  return static_cast<uint16_t>(column.added + row.added + sum * sum);
}

// f32 to bf16, away from zero with the probability that the dropped bits give.
NPUZERO_INLINE uint16_t round_stochastic(float x, uint16_t random) {
  const uint32_t u = bits_of(x);
  const bool special = (u & 0x7f800000u) == 0x7f800000u;
  return special ? BF16::round(x) : static_cast<uint16_t>((u + random) >> 16);
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero
