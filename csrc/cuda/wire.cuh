// Messages of a thin wire (core/wire.h), which begin where an access may: how the warps of a grid share the pieces of a
// buffer, and how codes become numbers and back.
#pragma once

#include "core/wire.h"
#include "cuda/access.cuh"

namespace npuzero::cuda {

constexpr int64_t warp_row = int64_t{warp} * group;  // what a warp moves at a time
constexpr int64_t warp_chunk = rows * warp_row;      // neighbouring rows, of a chunk, that a warp does as one

template <int bits>
constexpr int block_rows = wire_block(bits) / warp_row;  // of a wire's block, whose largest one warp finds

static_assert(block_rows<4> == 1 && block_rows<8> == 2 && rows % block_rows<8> == 0, "no warp has half a block");

// A buffer in equal pieces, and the bytes of each piece's message. Every piece begins with a chunk of its own, so that
// a chunk lies in one message.
struct Pieces {
  int64_t numel, bytes;
  uint32_t count, chunks_each;

  Pieces(int64_t n, int64_t pieces, int bits)
      : numel(n / pieces),
        bytes(message_bytes(numel, bits)),
        count(static_cast<uint32_t>(pieces)),
        chunks_each(static_cast<uint32_t>(chunks_of(numel))) {}

  int64_t chunks() const { return int64_t{count} * chunks_each; }
};

// body(piece, span, inside) for each chunk that falls to this block: this thread's first group in its piece, the others
// a warp_row apart, and whether the warp's chunk ends inside the piece. All threads of a warp come together, with
// elements or without.
template <class Body>
__device__ inline void for_chunks(const Pieces& pieces, const Body& body) {
  const uint32_t chunks = pieces.count * pieces.chunks_each;
  for (uint32_t i = blockIdx.x; i < chunks; i += gridDim.x) {
    const uint32_t piece = i / pieces.chunks_each;
    const int64_t begin = (i - piece * pieces.chunks_each) * chunk + threadIdx.x / warp * warp_chunk;
    body(piece, Span{begin + threadIdx.x % warp * group, pieces.numel}, begin + warp_chunk <= pieces.numel);
  }
}

__device__ inline Span in_warp_row(Span span, int u) { return {span.first + u * warp_row, span.n}; }

// The codes of a group.
template <int bits>
using Codes = std::conditional_t<bits == 8, uint32_t, uint16_t>;

// What a thread's groups from `start` on have in a piece's message: in row u codes[u * warp], scales[u / block_rows].
template <int bits>
struct Message {
  Codes<bits>* codes;
  uint16_t* scales;

  __device__ Message(uint8_t* message, int64_t numel, Span start)
      : codes(reinterpret_cast<Codes<bits>*>(message) + start.first / group),
        scales(reinterpret_cast<uint16_t*>(message + code_bytes(numel, bits)) + start.first / wire_block(bits)) {}
};

// -- codes and numbers, by an addition: conversions have fewer units in a processor -----------------------------------

// The code that is nearest to x, ties to even, as a number. Its lowest bits are the code, as they are of 1.5 * 2^23.
struct Nearest {
  float shifted;

  __device__ explicit Nearest(float x) : shifted(x + 0x1.8p23f) {}
  __device__ float value() const { return shifted - 0x1.8p23f; }
  __device__ uint32_t code() const { return bits_of(shifted); }
};

template <int bits>
__device__ inline Codes<bits> joined(const uint32_t (&codes)[group]) {
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < group; ++k) word |= (codes[k] & ((1u << bits) - 1)) << bits * k;
  return static_cast<Codes<bits>>(word);
}

// The codes of a word as numbers: with their sign's bit turned they are the lowest bits of 2^23 and what is above zero.
template <int bits>
__device__ inline Group<float> numbers(Codes<bits> word) {
  constexpr uint32_t mask = (1u << bits) - 1, sign = 1u << (bits - 1);
  constexpr float zero = 0x1p23f + sign;
  Group<float> to;
#pragma unroll
  for (int k = 0; k < group; ++k) {
    to.at[k] = float_of(0x4b000000u | (((uint32_t{word} >> bits * k) & mask) ^ sign)) - zero;
  }
  return to;
}

}  // namespace npuzero::cuda
