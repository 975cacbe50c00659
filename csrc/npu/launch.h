// The host's side of the npu kernels: from an op's Args to a table and a launch. Pure but for the Launcher, which is
// the device: over libascendcl in a build for it, the emulator in the tests.
#pragma once

#include "ops/cast.h"
#include "ops/dequantize_sum.h"
#include "ops/flat_adam.h"
#include "ops/flat_lion.h"
#include "ops/norm.h"
#include "ops/pack.h"
#include "ops/quantize.h"

namespace npuzero::npu {

class Launcher {
 public:
  virtual ~Launcher() = default;

  // Copies `bytes` bytes to the device, in stream order before the next launch; the address stays valid until that
  // launch is done. The content may equal an earlier call's: a launcher may keep copies and give the same address
  // again.
  virtual uint64_t table(const void* content, int64_t bytes, Stream stream) = 0;

  // Enqueues extern "C" kernel(table) on `cores` vector cores; does not wait.
  virtual void launch(const char* kernel, int cores, uint64_t table, Stream stream) = 0;
};

// The kernels by name, each `NPUZERO_KERNEL(name, ...)` in <op>.cpp of this folder.
inline constexpr const char* kernel_names[] = {"npuzero_cast",      "npuzero_dequantize_sum", "npuzero_flat_adam",
                                               "npuzero_flat_lion", "npuzero_norm",           "npuzero_norm_finish",
                                               "npuzero_pack",      "npuzero_quantize"};

// `cores`: the vector cores of the device, asked of it. What a contract allows and no kernel does raises
// KernelUnavailable.
void launch_cast(const CastArgs& args, Stream stream, int cores, Launcher& launcher);
void launch_dequantize_sum(const DequantizeSumArgs& args, Stream stream, int cores, Launcher& launcher);
void launch_flat_adam(const FlatAdamArgs& args, Stream stream, int cores, Launcher& launcher);
void launch_flat_lion(const FlatLionArgs& args, Stream stream, int cores, Launcher& launcher);
void launch_norm(const NormArgs& args, Stream stream, int cores, Launcher& launcher);
void launch_pack(const PackArgs& args, Stream stream, int cores, Launcher& launcher);
void launch_quantize(const QuantizeArgs& args, Stream stream, int cores, Launcher& launcher);

}  // namespace npuzero::npu
