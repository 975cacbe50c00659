// How kernels reach memory: eight elements at a time, in accesses of 16 bytes where the address allows, and work laid
// out over a grid that fits the device.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/numeric.h"
#include "cuda/launch.cuh"

namespace npuzero::cuda {

constexpr int group = 8;      // elements that a thread moves at a time: one access of 2-byte elements, two of f32
constexpr int threads = 256;  // of a block
constexpr int in_flight = 2;  // groups that a thread has loaded before it stores the first
constexpr int64_t chunk = int64_t{threads} * group * in_flight;  // elements that a block does at a time

// Every loop over a group is unrolled, so that it stays in registers.
template <class Bits>
struct alignas(sizeof(Bits) * group < 16 ? sizeof(Bits) * group : 16) Group {
  Bits at[group];
};

// Enough blocks to keep the device busy; each takes every grid-th chunk.
inline int64_t grid_for(int64_t chunks) { return std::min<int64_t>(chunks, int64_t{8} * processors()); }

// Elements first .. first + 8 of n, of which those from n on are not there.
struct Span {
  int64_t first, n;

  __device__ bool whole() const { return first + group <= n; }
  __device__ bool has(int k) const { return first + k < n; }
};

// What a group is moved by: 16 bytes, or the 8 that a group of codes has.
template <class Bits>
using Access = std::conditional_t<sizeof(Group<Bits>) < sizeof(uint4), uint2, uint4>;

template <class Bits>
__device__ inline bool in_accesses(const Bits* at, Span span) {
  return span.whole() && reinterpret_cast<uintptr_t>(at) % sizeof(Access<Bits>) == 0;
}

template <class To, class From>
__device__ inline void move_accesses(To* to, const From* from) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Group<To>) / sizeof(Access<To>)); ++i) {
    reinterpret_cast<Access<To>*>(to)[i] = reinterpret_cast<const Access<To>*>(from)[i];
  }
}

template <class Bits>
__device__ inline Group<Bits> load(const Bits* data, Span span) {
  Group<Bits> values = {};
  const Bits* from = data + span.first;
  if (in_accesses(from, span)) {
    move_accesses(values.at, from);
  } else {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      if (span.has(k)) values.at[k] = from[k];
    }
  }
  return values;
}

template <class Bits>
__device__ inline void store(Bits* data, Span span, const Group<Bits>& values) {
  Bits* to = data + span.first;
  if (in_accesses(to, span)) {
    move_accesses(to, values.at);
  } else {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      if (span.has(k)) to[k] = values.at[k];
    }
  }
}

template <class From>
__device__ inline Group<float> widened(const Group<typename From::Bits>& from) {
  Group<float> to;
#pragma unroll
  for (int k = 0; k < group; ++k) to.at[k] = From::widen(from.at[k]);
  return to;
}

template <class To>
__device__ inline Group<typename To::Bits> rounded(const Group<float>& from) {
  Group<typename To::Bits> to;
#pragma unroll
  for (int k = 0; k < group; ++k) to.at[k] = To::round(from.at[k]);
  return to;
}

// The parts of one launch, in its parameters: part i has the chunks from first[i] to first[i + 1].
template <class Part, int capacity>
struct Table {
  int count = 0;
  uint32_t first[capacity + 1] = {};
  Part parts[capacity];

  int64_t chunks() const { return first[count]; }

  // Whether there is room for it; adds it if so.
  bool add(const Part& part, int64_t elements) {
    const int64_t next = first[count] + (elements + chunk - 1) / chunk;
    if (count == capacity || next > UINT32_MAX) return false;
    parts[count] = part;
    first[++count] = static_cast<uint32_t>(next);
    return true;
  }

  // The part that a chunk belongs to.
  __device__ int part_of(uint32_t of_chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (first[middle + 1] > of_chunk) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

// body(part, begin) for each chunk that falls to this block; begin is that of the thread's first group in the part, the
// next is a stride further on.
constexpr int64_t stride = int64_t{threads} * group;

template <class Part, int capacity, class Body>
__device__ inline void for_chunks(const Table<Part, capacity>& table, const Body& body) {
  const uint32_t chunks = table.first[table.count];
  for (uint32_t i = blockIdx.x; i < chunks; i += gridDim.x) {
    const int part = table.part_of(i);
    body(table.parts[part], (i - table.first[part]) * chunk + threadIdx.x * group);
  }
}

}  // namespace npuzero::cuda
