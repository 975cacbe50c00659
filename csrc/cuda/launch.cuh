// Launching a kernel, and what it is sent. The only header here that needs the CUDA run time: tests/cuda/host has
// another of this name, which runs the same kernels on the processor.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <string>

#include "core/check.h"
#include "core/view.h"

namespace npuzero::cuda {

// Bytes of a kernel's parameters, since CUDA 12.1 on sm_70 and later. A table in them needs no copy to the device, no
// memory that has to live on, and is part of a captured graph.
constexpr int64_t parameter_bytes = 32764;

inline void check(const char* op, cudaError_t status) {
  if (status != cudaSuccess) {
    throw Error(Error::Kind::State, op, "a launch that the CUDA run time takes", cudaGetErrorString(status),
                "Run with CUDA_LAUNCH_BLOCKING=1 to see which kernel fails; its error may be an earlier one's.");
  }
}

// How many blocks of so many threads the current device runs at a time. Asked once a kernel and device; asking is no
// work of a stream, so a stream may be captured meanwhile.
template <auto kernel>
int64_t resident_blocks(int threads) {
  static std::array<std::atomic<int>, 64> known;  // by device, 0 where not asked yet
  int device = 0;
  check("device", cudaGetDevice(&device));
  std::atomic<int>& blocks = known.at(device);
  if (blocks == 0) {
    int processors = 0, of_each = 0;
    check("device", cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    check("device", cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, threads, 0));
    blocks = processors * of_each;
  }
  return blocks;
}

template <auto kernel, class... Arguments>
void launch(const char* op, int64_t blocks, int threads, Stream stream, const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments...);
  check(op, cudaGetLastError());
}

}  // namespace npuzero::cuda
