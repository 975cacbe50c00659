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

constexpr int32_t kSlotBytes = 16384;  // what one load or store moves, of the widest dtype in it

// [begin, end) of the line, and the index of the part that begin is in.
struct Share {
  int64_t begin, end, part;
};

// Every table begins with this; the shares follow the head, the parts the shares, and groups (of flat_adam) the parts.
struct Head {
  int32_t cores, parts;
};

// lead: elements before the first one at which what is written lies on a 512-byte boundary.
struct PackRow {
  uint64_t source, target;
  int64_t count, line, lead;
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

struct NormHead {
  Head head;
  uint64_t x, addend, out, workspace;
  int32_t x_dtype, addend_dtype;
  float scale;
  int32_t reserved;
  int64_t count;
};

}  // namespace npu
}  // namespace npuzero
