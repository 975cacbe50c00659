// View: what C++ knows of a tensor. Memory is the caller's and outlives the call; data is contiguous.
#pragma once

#include <cstdint>

namespace npuzero {

// The integers are the Python side's too (npuzero/_native.py): append, never reorder.
enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, i32 = 4, i64 = 5, u8 = 6, i16 = 7 };
enum class Device : int { cpu = 0, cuda = 1, npu = 2 };
constexpr int device_kinds = 3, dtype_kinds = 8;

struct View {
  void* data = nullptr;
  int64_t count = 0;  // elements
  Dtype dtype = Dtype::f32;
  Device device = Device::cpu;
};

// An accelerator's stream as an integer; 0 on the cpu, where kernels run before the call returns.
using Stream = std::uintptr_t;

constexpr const char* name(Dtype dtype) {
  constexpr const char* names[] = {"f32", "bf16", "f16", "f64", "i32", "i64", "u8", "i16"};
  return names[static_cast<int>(dtype)];
}

constexpr const char* name(Device device) {
  constexpr const char* names[] = {"cpu", "cuda", "npu"};
  return names[static_cast<int>(device)];
}

constexpr int64_t itemsize(Dtype dtype) {
  constexpr int64_t sizes[] = {4, 2, 2, 8, 4, 8, 1, 2};
  return sizes[static_cast<int>(dtype)];
}

}  // namespace npuzero
