// The draws of ops/cast.h for groups of elements.
#pragma once

#include "core/random.h"
#include "cuda/access.cuh"

namespace npuzero::cuda {

// 16 bits for each element of a group.
struct Draws {
  uint32_t words[group / 2];

  __device__ uint16_t operator[](int k) const { return static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16)); }
};

constexpr int drawn = 8;  // elements that one Philox serves: two groups
constexpr int pair = 2;   // rows that draws are made for together

// For the group from element `index` on, whatever it is.
__device__ inline Draws draw(uint64_t index, uint32_t stream, uint32_t step, uint64_t seed) {
  uint32_t words[2 * drawn / 2];
  philox(index / drawn, stream, step, seed, words);
  philox(index / drawn + 1, stream, step, seed, words + drawn / 2);
  for (uint64_t i = 0; i < index % drawn; ++i) {  // down by 16 bits, and not an index that is known at run time only
#pragma unroll
    for (int k = 0; k < drawn - 1; ++k) words[k] = words[k] >> 16 | words[k + 1] << 16;
  }
  return {words[0], words[1]};
}

// For a thread's groups from `index` and from `index + row` on. Two neighbours have the halves of two draws, so each
// makes one of them and they exchange what is the other's: all threads of a warp come here together.
__device__ inline void draw(Draws (&draws)[pair], uint64_t index, uint32_t stream, uint32_t step, uint64_t seed) {
  const bool odd = threadIdx.x % 2;
  if ((index - threadIdx.x * group) % drawn != 0) {  // the same for all threads of a block
#pragma unroll
    for (int u = 0; u < pair; ++u) draws[u] = draw(index + u * row, stream, step, seed);
    return;
  }
  uint32_t words[drawn / 2];
  philox((index + (odd ? row : 0)) / drawn, stream, step, seed, words);
#pragma unroll
  for (int k = 0; k < group / 2; ++k) {
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? words[k] : words[k + 2], 1, 32);
    draws[0].words[k] = odd ? theirs : words[k];
    draws[1].words[k] = odd ? words[k + 2] : theirs;
  }
}

__device__ inline Group<uint16_t> rounded(const Group<float>& from, const Draws& draws) {
  Group<uint16_t> to;
#pragma unroll
  for (int k = 0; k < group; ++k) to.at[k] = round_stochastic(from.at[k], draws[k]);
  return to;
}

}  // namespace npuzero::cuda
