// sum: the sum of several arrays, element by element, in the order given.
//
//   out[i] = round(((in[0][i] + in[1][i]) + in[2][i]) + ...)          accumulate: round(out[i] + that sum)
//
//   in   wire[n] each (the dtype that travels), read only; out: of that dtype, or f32; may be one of `in`, or overlap
//        none
//   bf16, f16, f32 are added in f32 and rounded once, to nearest even; f64 in f64; integers wrap around
//   streaming: `out` is written past the caches, for large results that nobody reads soon; out is then none of `in`
//   n = 0 is legal; the result depends on neither chunking nor instruction set
#pragma once

#include <cstddef>

#include "core/view.h"

namespace npuzero::comm {

void sum(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n, bool accumulate,
         bool streaming);

}  // namespace npuzero::comm
