// The cuda kernels: one function per op, as the kernel table takes them.
#pragma once

#include "core/kernel_table.h"
#include "ops/cast.h"
#include "ops/flat_adam.h"
#include "ops/flat_lion.h"
#include "ops/norm.h"
#include "ops/pack.h"

namespace npuzero::cuda {

void cast(const CastArgs&, Stream);
void flat_adam(const FlatAdamArgs&, Stream);
void flat_lion(const FlatLionArgs&, Stream);
void norm(const NormArgs&, Stream);
void pack(const PackArgs&, Stream);

inline void fill() {
  set_kernel<CastArgs>(Device::cuda, &cast);
  set_kernel<FlatAdamArgs>(Device::cuda, &flat_adam);
  set_kernel<FlatLionArgs>(Device::cuda, &flat_lion);
  set_kernel<NormArgs>(Device::cuda, &norm);
  set_kernel<PackArgs>(Device::cuda, &pack);
}

}  // namespace npuzero::cuda
