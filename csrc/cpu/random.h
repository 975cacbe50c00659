// The draws of ops/cast.h, a tile at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/random.h"
#include "cpu/write.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// All columns' shares.
struct Columns {
  uint64_t seed;
  uint16_t added[draw_columns], squared[draw_columns];

  explicit Columns(uint64_t seed) : seed(seed) {
    uint32_t words[draw_columns];
#pragma omp simd
    for (int i = 0; i < draw_columns / 4; ++i) column_words(static_cast<uint32_t>(i), seed, words + 4 * i);
    for (int i = 0; i < draw_columns; ++i) {
      const DrawShare share = DrawShare::of_column(words[i]);
      added[i] = share.added, squared[i] = share.squared;
    }
  }

  // Each thread keeps those of the seed that it saw last: to make them takes as long as to round some thousand
  // elements.
  static const Columns& of(uint64_t seed) {
    thread_local Columns columns(seed);
    if (columns.seed != seed) columns = Columns(seed);
    return columns;
  }
};

// What a draw depends on, beside the element's place.
struct Draws {
  uint64_t seed;
  uint32_t stream, step;

  // Those of n elements from `place` on.
  void make(uint64_t place, uint16_t* __restrict draws, int64_t n) const {
    const Columns& columns = Columns::of(seed);
    for (int64_t i = 0; i < n;) {
      const DrawShare row = DrawShare::of_row(row_word((place + i) / draw_columns, stream, step, seed));
      const int64_t first = static_cast<int64_t>((place + i) % draw_columns);
      const int64_t count = std::min(n - i, draw_columns - first);
      const uint16_t* __restrict added = columns.added + first;
      const uint16_t* __restrict squared = columns.squared + first;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) draws[i + j] = draw(DrawShare{added[j], squared[j]}, row);
      i += count;
    }
  }
};

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
