// sum's loops for AVX-512. Headers of the standard library come first: their functions must keep the baseline's target,
// since the linker keeps one copy of each.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/view.h"

#define NPUZERO_ISA avx512
// What the target below has: g++ defines no __F16C__ for a pragma.
#define NPUZERO_SUM_F16C
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")
#endif
#include "comm/sum_loops.h"

namespace npuzero::comm {

void sum_avx512(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n, bool accumulate,
                bool streaming) {
  sum_loops(out, result, in, inputs, wire, n, accumulate, streaming);
}

}  // namespace npuzero::comm
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
