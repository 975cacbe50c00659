// The cuda kernels: those of all ops of ops/ops.h.
#pragma once

#include "core/kernel_table.h"
#include "ops/ops.h"

namespace npuzero::cuda {

NPUZERO_OPS(NPUZERO_DECLARE)

#define NPUZERO_CUDA_FILL(op, Args) set_kernel<Args>(Device::cuda, &op);
inline void fill() { NPUZERO_OPS(NPUZERO_CUDA_FILL) }

}  // namespace npuzero::cuda
