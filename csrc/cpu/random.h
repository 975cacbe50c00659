// The draws of ops/cast.h, a tile at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/random.h"
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
#pragma omp simd
    for (int64_t i = 0; i < blocks; ++i) {
      philox(place / each + static_cast<uint64_t>(i), stream, step, seed, words + 4 * i);
    }
    std::memcpy(halves, words, sizeof words);
    return halves + place % each;
  }
};

using Halves = uint16_t[Draws::each * Draws::blocks];

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
