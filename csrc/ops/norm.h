// norm: sum of squares and number of non-finite elements, in one pass; with an addend, of what the addition gives.
//
//   x[i] = x[i] + f32(addend[i]) * scale      only where there is an addend
//   out[0] = sum of f64(x[i])^2      out[1] = number of i where x[i] is infinite or NaN
//
// Contract
//   x: f32|bf16|f16[n], read only; with an addend f32[n], in place; addend: f32|bf16|f16[n], read only, or null
//   out: f64[2]; workspace: f64[2 * norm_blocks(n)], content irrelevant before and after
//   every element takes part in the sum: it is infinite or NaN where out[1] > 0 and finite elsewhere
//   order: element i of a block of 4096 goes to lane i mod 32; lanes are added as a tree (16, 8, 4, 2, 1 apart), the
//   blocks' sums as a tree of neighbours (1, 2, 4, ... apart; what has no neighbour goes on as it is). It depends on n
//   alone: not on threads, instruction set or alignment
//   n = 0 is legal and gives {0, 0}; buffers do not overlap; enqueued on the stream, not awaited
//   rounding: the addition as f32 operations in the order written, no contraction: bit for bit the reference; squares
//   are exact in f64 for every dtype here, sums in f64, so that sums over a buffer agree, however it is sharded, to far
//   below an ulp of f32
#pragma once

#include "core/view.h"

namespace npuzero {

constexpr int64_t norm_block = 4096;
constexpr int64_t norm_blocks(int64_t n) { return (n + norm_block - 1) / norm_block; }

struct NormArgs {
  static constexpr const char* op = "norm";
  View x, out, workspace;
  const View* addend;
  float scale;
};

}  // namespace npuzero
