// The draws of ops/cast.h for one group of elements.
#pragma once

#include "core/random.h"
#include "cuda/access.cuh"

namespace npuzero::cuda {

struct Draws {
  uint32_t words[8];

  // For the elements from `index` on; `stream` and `step` are the counter's words 2 and 3.
  __device__ Draws(uint64_t index, uint32_t stream, uint32_t step, uint64_t seed) {
    philox(index / group, stream, step, seed, words);
    if (index % group == 0) return;
    philox(index / group + 1, stream, step, seed, words + 4);
    for (uint64_t i = 0; i < index % group; ++i) {  // down by 16 bits, and not an index that is known at run time only
#pragma unroll
      for (int k = 0; k < 7; ++k) words[k] = words[k] >> 16 | words[k + 1] << 16;
      words[7] >>= 16;
    }
  }

  __device__ uint16_t operator[](int k) const { return static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16)); }
};

__device__ inline Group<uint16_t> rounded(const Group<float>& from, const Draws& draws) {
  Group<uint16_t> to;
#pragma unroll
  for (int k = 0; k < group; ++k) to.at[k] = round_stochastic(from.at[k], draws[k]);
  return to;
}

}  // namespace npuzero::cuda
