// Every op once, in the order of their names: its name and the struct of its arguments. The table of cpu kernels, the
// extension's functions and the driver's are made from this list.
#pragma once

#include "ops/cast.h"
#include "ops/dequantize_sum.h"
#include "ops/flat_adam.h"
#include "ops/flat_lion.h"
#include "ops/norm.h"
#include "ops/pack.h"
#include "ops/quantize.h"

// clang-format off
#define NPUZERO_OPS(each)                 \
  each(cast, CastArgs)                    \
  each(dequantize_sum, DequantizeSumArgs) \
  each(flat_adam, FlatAdamArgs)           \
  each(flat_lion, FlatLionArgs)           \
  each(norm, NormArgs)                    \
  each(pack, PackArgs)                    \
  each(quantize, QuantizeArgs)
// clang-format on

// For one of them: the declaration of its kernel, in the namespace of the kernels.
#define NPUZERO_DECLARE(op, Args) void op(const npuzero::Args&, npuzero::Stream);
