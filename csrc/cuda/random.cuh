// The draws of ops/cast.h for groups of elements.
#pragma once

#include "core/random.h"
#include "cuda/access.cuh"

namespace npuzero::cuda {

// 16 bits for each element of a group.
using Draws = Group<uint16_t>;

// All columns' words, which a block makes once, its threads together.
__device__ inline const uint32_t* shared_columns(uint64_t seed) {
  __shared__ uint32_t words[draw_columns];
  for (int i = threadIdx.x; i < draw_columns / 4; i += threads) column_words(i, seed, words + 4 * i);
  __syncthreads();
  return words;
}

// What a chunk's elements are drawn from. All threads of a warp come here together: each makes the word of one row.
class Drawing {
 public:
  // `begin` is the index of the chunk's first element.
  __device__ Drawing(const uint32_t* columns, uint64_t begin, uint32_t stream, uint32_t step, uint64_t seed)
      : columns_(columns), first_(static_cast<int>(begin % draw_columns)) {
    const unsigned lane = threadIdx.x % (2 * most_rows);
    word_ = row_word(begin / draw_columns + lane % most_rows, stream + (lane / most_rows << 31), step, seed);
  }

  // For the group from element `at` of the chunk on; of stream + 2^31 where it is the second's.
  __device__ Draws operator()(int at, bool second = false) const {
    const int first = first_ + at, line = first / draw_columns + (second ? most_rows : 0);
    const uint32_t word = __shfl_sync(0xffffffffu, word_, line), next = __shfl_sync(0xffffffffu, word_, line + 1);
    const int left = draw_columns - first % draw_columns;  // in this row
    Draws draws;
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const DrawShare column = DrawShare::of_column(columns_[(first + k) % draw_columns]);
      draws.at[k] = draw(column, DrawShare::of_row(k < left ? word : next));
    }
    return draws;
  }

 private:
  static constexpr unsigned most_rows = 16;  // of each stream: a warp's lanes
  static_assert(chunk / draw_columns + 2 <= most_rows, "a chunk and what is next to it lie in fewer rows");

  const uint32_t* columns_;
  int first_;  // column of the chunk's first element
  uint32_t word_;
};

__device__ inline Group<uint16_t> rounded(const Group<float>& from, const Draws& draws) {
  Group<uint16_t> to;
#pragma unroll
  for (int k = 0; k < group; ++k) to.at[k] = round_stochastic(from.at[k], draws.at[k]);
  return to;
}

}  // namespace npuzero::cuda
