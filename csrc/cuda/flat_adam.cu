// The contract is in ops/flat_adam.h.
#include "cuda/flat.cuh"
#include "ops/flat_adam.h"

namespace npuzero::cuda {
namespace {

__device__ float max_or_nan(float a, float b) { return a != a ? a : (a > b ? a : b); }  // b where b is NaN

struct Adam {
  using Args = FlatAdamArgs;

  static __device__ float update(const FlatAdamGroup& k, float g, float p, Group<float>* moments, int i) {
    float &m = moments[0].at[i], &v = moments[1].at[i];
    if (k.l2) g = g + k.weight_decay * p;
    const float decayed = p * k.decay;
    m = k.beta1 * m + k.one_minus_beta1 * g;
    v = k.beta2 * v + (k.one_minus_beta2 * g) * g;
    float x = v;
    if (k.amsgrad) x = moments[2].at[i] = max_or_nan(moments[2].at[i], x);
    return decayed - (k.step_size * m) / (sqrtf(x) / k.bias2_sqrt + k.eps);
  }
};

}  // namespace

void flat_adam(const FlatAdamArgs& args, Stream stream) { run<Adam>(args, stream); }

}  // namespace npuzero::cuda
