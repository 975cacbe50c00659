#include "comm/sum.h"

#include "comm/sum_loops.h"

namespace npuzero::comm {
namespace {

using Sum = decltype(sum);

}  // namespace

#if defined(__x86_64__)
Sum sum_avx2, sum_avx512;

namespace {

Sum* best() {
  __builtin_cpu_init();
  const bool half = __builtin_cpu_supports("f16c");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (half && wide) return sum_avx512;
  return half && __builtin_cpu_supports("avx2") ? sum_avx2 : sum_loops;
}

}  // namespace
#else
namespace {

Sum* best() { return sum_loops; }

}  // namespace
#endif

void sum(void* out, Dtype result, const void* const* in, int inputs, Dtype wire, size_t n, bool accumulate,
         bool streaming) {
  static Sum* const loops = best();
  loops(out, result, in, inputs, wire, n, accumulate, streaming);
}

}  // namespace npuzero::comm
