// The memory that a driver's kernels work on: this processor's, or with NPUZERO_DRIVER_GPU the current GPU's own.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef NPUZERO_DRIVER_GPU
#include <cuda_runtime.h>
#endif

namespace npuzero {

constexpr int64_t memory_line = 64;  // what it is aligned to

#ifdef NPUZERO_DRIVER_GPU

inline void check(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Ends the program where there is no GPU to work on.
inline void check_device() { check("no GPU", cudaFree(nullptr)); }

class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) { check("cudaMalloc", cudaMalloc(&start_, bytes)); }
  ~Memory() { check("cudaFree", cudaFree(start_)); }
  Memory(const Memory&) = delete;

  char* start() { return start_; }
  void put(const char* from) {
    check("a copy to the device", cudaMemcpy(start_, from, bytes_, cudaMemcpyHostToDevice));
  }
  void get(char* to) { check("a kernel", cudaMemcpy(to, start_, bytes_, cudaMemcpyDeviceToHost)); }

 private:
  int64_t bytes_;
  char* start_ = nullptr;
};

#else

inline void check_device() {}

class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes), room_(bytes + memory_line) {}
  Memory(const Memory&) = delete;

  char* start() {
    return room_.data() + (memory_line - reinterpret_cast<uintptr_t>(room_.data()) % memory_line) % memory_line;
  }
  void put(const char* from) { std::memcpy(start(), from, bytes_); }
  void get(char* to) { std::memcpy(to, start(), bytes_); }

 private:
  int64_t bytes_;
  std::vector<char> room_;
};

#endif

}  // namespace npuzero
