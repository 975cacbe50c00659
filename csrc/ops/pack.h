// pack: moves many ranges between tensors and one flat communication buffer, with a cast, a scale and an addition on
// the way. unpack is the same op with source and target changed over, so there is one kernel.
//
//   target = round(f32(source) * scale)                      scale = factor * *scale_at (1 where absent)
//   target = round(f32(target) + f32(source) * scale)        where accumulate
//
// Contract
//   each part: count elements from source to target, each f32|bf16|f16; all sources of one call need not have one dtype
//   scale_at: f32[1] on the device, or null
//   neither scaled nor accumulated, and the dtypes equal: a copy of the bits
//   n = 0 and no parts are legal; sources and targets do not overlap, nor do two targets; enqueued on the stream
//   rounding: f32 operations in the order written, no contraction, then one rounding to nearest even (core/numeric.h);
//   equal to the reference bit for bit (a NaN's payload aside)
#pragma once

#include "core/view.h"

namespace npuzero {

struct PackPart {
  const void* source;
  void* target;
  int64_t count;
  int64_t line;  // elements of all parts before this one
  Dtype source_dtype, target_dtype;
};

struct PackArgs {
  static constexpr const char* op = "pack";
  const PackPart* parts;
  int64_t part_count, total;
  float factor;
  const float* scale_at;
  bool scaled, accumulate;
};

}  // namespace npuzero
