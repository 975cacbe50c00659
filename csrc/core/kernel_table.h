// The kernel table: for each op's Args one slot per device. Availability is a filled slot; nothing falls back.
#pragma once

#include "core/check.h"
#include "core/view.h"

namespace npuzero {

template <class Args>
using Kernel = void (*)(const Args&, Stream);

template <class Args>
inline Kernel<Args> kernel_slots[device_kinds] = {};

template <class Args>
bool has_kernel(Device device) {
  return kernel_slots<Args>[static_cast<int>(device)] != nullptr;
}

template <class Args>
void set_kernel(Device device, Kernel<Args> kernel) {
  kernel_slots<Args>[static_cast<int>(device)] = kernel;
}

template <class Args>
void run_kernel(Device device, const Args& args, Stream stream) {
  if (!has_kernel<Args>(device)) {
    throw Error(Error::Kind::KernelUnavailable, Args::op, std::string("a kernel for ") + name(device), "none",
                device == Device::npu ? "Run `npuzero build-npu` where CANN is, or set NPUZERO_BACKEND=reference."
                                      : "Build npuzero where that toolkit is found, or set NPUZERO_BACKEND=reference.");
  }
  kernel_slots<Args>[static_cast<int>(device)](args, stream);
}

}  // namespace npuzero
