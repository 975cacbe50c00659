// What a launch leaves in device memory for its kernel: a head, a share of the line for every core, the parts. Read by
// the kernels and filled by the host (launch.cpp), so integers of fixed size alone; an address is a uint64_t, 0 where
// absent.
//
// A kernel takes one argument, the address of its table. Parts lie end to end on a line; a core does the elements of
// its share, whichever parts they are in.
#pragma once

#include <cstdint>

namespace npuzero {
namespace npu {

// The numbers of core/view.h's Dtype that kernels know.
constexpr int32_t kF32 = 0;
constexpr int32_t kBF16 = 1;
constexpr int32_t kF16 = 2;
constexpr int32_t kU8 = 6;

constexpr int32_t kSlotBytes = 16384;  // what one load or store moves, of the widest dtype in it

constexpr int32_t kGrain = 256;  // elements; from one place to the next, what is written stays on a 512-byte boundary

// [begin, end) of the line, and the index of the part that begin is in.
struct Share {
  int64_t begin, end, part;
};

// Every table begins with this. The shares follow the head, the parts the shares, groups (of updates) the parts, and
// the columns of draws all of it, `columns` bytes from the table's begin, where anything is rounded stochastically: two
// arrays of kDrawTable integers (draws.h), a and C + a * a, each behind a spare block. 0: there are none.
struct Head {
  int32_t cores, parts;
  int64_t columns;
};
constexpr int32_t kDrawColumns = 2048;
constexpr int32_t kDrawTable = kDrawColumns + 8;

// What all parts have. lead: elements before the first one at which everything written lies on a 512-byte boundary.
struct Piece {
  int64_t count, line;
  int32_t lead, tile;  // tile: elements of one turn of load, compute and store
};

struct PackRow {
  Piece piece;
  uint64_t source, target;
  int32_t source_dtype, target_dtype;
};

struct PackHead {
  Head head;
  uint64_t scale_at;
  float factor;
  int32_t scaled, accumulate, reserved;
};

struct CastHead {
  Head head;
  uint32_t seed_low, seed_high;
  uint64_t offset;
  int32_t rounding, reserved;
};

// A piece of quantize or dequantize_sum: its elements, where its codes and scales lie in the (first row's) message, and
// its residual, or 0.
struct WireRow {
  Piece piece;
  uint64_t values, codes, scales, residual;
};

// What both have. dtype: of the elements. block: elements that share a scale. tile: of all rows.
struct Wire {
  int32_t dtype, bits, block, tile;
};

// inverse: 1 / the largest code. residual: whether there is one.
struct QuantizeHead {
  Head head;
  Wire wire;
  float inverse;
  int32_t residual;
};

// row_bytes: from one row's messages to the next one's.
struct DequantizeHead {
  Head head;
  Wire wire;
  int64_t row_bytes;
  int32_t rows, accumulate;
};

// Shares are of elements here, in multiples of kNormBlock.
struct NormHead {
  Head head;
  uint64_t x, addend, out, workspace;
  int32_t x_dtype, addend_dtype;
  float scale;
  int32_t reserved;
};

// What is summed together before the sums are added exactly; it decides where float32 pairs round, so it is not free.
constexpr int32_t kNormBlock = 65536;
constexpr int32_t kNormBytes = 256;  // of the workspace, that one core leaves its sums in

struct AdamGroup {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size, bias2_sqrt;
  int32_t l2, maximize, amsgrad, row;
  uint32_t step;
};
constexpr int32_t kAdamColumns = 4;  // of dynamic: step_size, bias2_sqrt, decay, step

struct LionGroup {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size;
  int32_t maximize, row;
  uint32_t step;
};
constexpr int32_t kLionColumns = 3;  // of dynamic: step_size, decay, step

constexpr int32_t kFlatMoments = 3;  // the most that an update has
constexpr int32_t kCodeBlock = 64;   // elements of a moment in codes (kU8) that share an exponent

// exponents: of codes, else 0
struct FlatMoment {
  uint64_t values, exponents;
};

// master_dtype kBF16: with a remainder its upper half, without one all there is, rounded stochastically.
struct FlatRow {
  Piece piece;
  uint64_t master, remainder, grad, low, place;
  FlatMoment moments[kFlatMoments];
  int32_t master_dtype, moment_dtype, grad_dtype, low_dtype, group;
  uint32_t stream;
};

// tile, moments: of all rows, by which UB is laid out. rooms: arrays of scratch, 1 or 2. coded: whether any moment is
// kU8.
struct FlatHead {
  Head head;
  uint64_t grad_scale, skip, dynamic, seed;
  int32_t tile, moments, rooms, coded;
};

}  // namespace npu
}  // namespace npuzero
