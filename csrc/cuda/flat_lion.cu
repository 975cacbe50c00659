// The contract is in ops/flat_lion.h.
#include "cuda/flat.cuh"
#include "ops/flat_lion.h"

namespace npuzero::cuda {
namespace {

struct Lion {
  using Args = FlatLionArgs;

  static __device__ float update(const FlatLionGroup& k, float g, float p, Group<float>* moments, int i) {
    float& m = moments[0].at[i];
    const float c = k.beta1 * m + k.one_minus_beta1 * g;
    const float sign = c > 0.0f ? 1.0f : (c < 0.0f ? -1.0f : c);
    m = k.beta2 * m + k.one_minus_beta2 * g;
    return p * k.decay - k.step_size * sign;
  }
};

}  // namespace

void flat_lion(const FlatLionArgs& args, Stream stream) { run<Lion>(args, stream); }

}  // namespace npuzero::cuda
