#include "comm/sum.h"

#include "comm/sum_loops.h"

namespace npuzero::comm {

#if defined(__x86_64__)
void sum_avx2(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n, bool accumulate);
#endif

void sum(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n, bool accumulate) {
#if defined(__x86_64__)
  static const auto best = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? sum_avx2 : sum_loops;
  best(out, result, in, inputs, wire, n, accumulate);
#else
  sum_loops(out, result, in, inputs, wire, n, accumulate);
#endif
}

}  // namespace npuzero::comm
