// How kernels reach memory, and how work is laid out over the device: four elements of each buffer at a time, so that
// the threads of a warp touch neighbouring bytes whatever the dtype, in accesses of up to 16 bytes; all that a chunk
// needs is loaded before the first of it is used.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/numeric.h"
#include "cuda/launch.cuh"

namespace npuzero::cuda {

constexpr int group = 4;                           // elements that a thread moves at a time
constexpr int threads = 256;                       // of a block
constexpr int warp = 32;                           // of them
constexpr int64_t row = int64_t{threads} * group;  // what a block moves at a time
constexpr int rows = 4;                            // of a chunk, that a block does as one
constexpr int64_t chunk = rows * row;              // elements

// Every loop over a group is unrolled, so that it stays in registers.
template <class Bits>
struct alignas(sizeof(Bits) * group) Group {
  Bits at[group];
};

// What a group is moved by.
template <class Bits>
using Access = std::conditional_t<sizeof(Bits) == 4, uint4, std::conditional_t<sizeof(Bits) == 2, uint2, uint32_t>>;

// The elements first, first + apart, ... of a thread's group, of which those from n on are not there.
struct Span {
  int64_t first, n;
  int apart = 1;

  __device__ int64_t index(int k) const { return first + int64_t{k} * apart; }
  __device__ bool has(int k) const { return index(k) < n; }
};

// This thread's group in the row of n elements' buffers that begins at `begin`: four neighbours; or four that are
// apart, so that threads move neighbours one by one, where no element asks what is beside it.
__device__ inline Span together(int64_t begin, int64_t n) { return {begin + threadIdx.x * group, n}; }
__device__ inline Span side_by_side(int64_t begin, int64_t n) { return {begin + threadIdx.x, n, threads}; }

// Whether groups of a buffer begin where an access may; a part is moved by accesses where all its buffers say so.
inline bool accessible(const void* data, int64_t itemsize) {
  return reinterpret_cast<uintptr_t>(data) % (group * itemsize) == 0;
}
inline bool accessible(const void* data, Dtype dtype) { return accessible(data, itemsize(dtype)); }
template <class Bits>
inline bool accessible(const Bits* data) {
  return accessible(data, static_cast<int64_t>(sizeof(Bits)));
}

// Calls body(std::true_type) where whole groups can be moved by accesses, and else body(std::false_type). `whole` is
// one for all threads of a warp; what the two do differently should be loads or stores alone.
template <class Body>
__device__ inline void with_access(bool whole, const Body& body) {
  if (whole) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// What is touched once in a long while passes through the cache as the first to leave it again.
enum class Reuse { soon, late };

template <bool whole, Reuse reuse = Reuse::late, class Bits>
__device__ inline Group<std::remove_const_t<Bits>> load(Bits* data, Span span) {
  Group<std::remove_const_t<Bits>> values = {};
  if constexpr (whole) {
    const auto* from = reinterpret_cast<const Access<Bits>*>(data + span.first);
    *reinterpret_cast<Access<Bits>*>(values.at) = reuse == Reuse::late ? __ldcs(from) : *from;
  } else {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      if (span.has(k)) values.at[k] = data[span.index(k)];
    }
  }
  return values;
}

template <bool whole, Reuse reuse = Reuse::soon, class Bits>
__device__ inline void store(Bits* data, Span span, const Group<Bits>& values) {
  if constexpr (whole) {
    auto* to = reinterpret_cast<Access<Bits>*>(data + span.first);
    const auto& from = *reinterpret_cast<const Access<Bits>*>(values.at);
    if constexpr (reuse == Reuse::late) {
      __stcs(to, from);
    } else {
      *to = from;
    }
  } else {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      if (span.has(k)) data[span.index(k)] = values.at[k];
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

// -- elements of whatever dtype, asked at run time, where a block's threads get one answer
// -----------------------------

// A group as it lies in memory: of four bytes an element, or of two. What follows is for a thread's groups in `count`
// rows.
struct Raw {
  Group<float> wide;
  Group<uint16_t> narrow;
};

__device__ inline Span in_row(Span span, int u) { return {span.first + u * row, span.n, span.apart}; }

template <bool whole, int count>
__device__ inline void load(Raw (&raw)[count], const void* data, Dtype dtype, Span span) {
  if (dtype == Dtype::f32) {
#pragma unroll
    for (int u = 0; u < count; ++u) raw[u].wide = load<whole>(static_cast<const float*>(data), in_row(span, u));
  } else {
#pragma unroll
    for (int u = 0; u < count; ++u) raw[u].narrow = load<whole>(static_cast<const uint16_t*>(data), in_row(span, u));
  }
}

template <bool whole, int count>
__device__ inline void store(void* data, Dtype dtype, Span span, const Raw (&raw)[count]) {
  if (dtype == Dtype::f32) {
#pragma unroll
    for (int u = 0; u < count; ++u) store<whole>(static_cast<float*>(data), in_row(span, u), raw[u].wide);
  } else {
#pragma unroll
    for (int u = 0; u < count; ++u) store<whole>(static_cast<uint16_t*>(data), in_row(span, u), raw[u].narrow);
  }
}

template <int count>
__device__ inline void widen(Raw (&raw)[count], Dtype dtype) {
  if (dtype == Dtype::bf16) {
#pragma unroll
    for (int u = 0; u < count; ++u) raw[u].wide = widened<BF16>(raw[u].narrow);
  } else if (dtype == Dtype::f16) {
#pragma unroll
    for (int u = 0; u < count; ++u) raw[u].wide = widened<F16>(raw[u].narrow);
  }
}

template <int count>
__device__ inline void round(Raw (&raw)[count], Dtype dtype) {
  if (dtype == Dtype::bf16) {
#pragma unroll
    for (int u = 0; u < count; ++u) raw[u].narrow = rounded<BF16>(raw[u].wide);
  } else if (dtype == Dtype::f16) {
#pragma unroll
    for (int u = 0; u < count; ++u) raw[u].narrow = rounded<F16>(raw[u].wide);
  }
}

// -- the work of a launch ---------------------------------------------------------------------------------------------

constexpr int64_t chunks_of(int64_t elements) { return (elements + chunk - 1) / chunk; }

// Launches a block for each chunk; or for some chunks each, every grid-th, where the device is filled many times over
// nevertheless. So the device gives out the work as its parts, which are not equally fast, get done, and the last
// blocks, which do not fill it, are little of all.
template <auto kernel, class... Arguments>
inline void launch_over(const char* op, int64_t chunks, Stream stream, const Arguments&... arguments) {
  constexpr int64_t least_fills = 16, most_each = 8;
  const int64_t each = std::clamp<int64_t>(chunks / (least_fills * resident_blocks<kernel>(threads)), 1, most_each);
  launch<kernel>(op, (chunks + each - 1) / each, threads, stream, arguments...);
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
    const int64_t next = first[count] + chunks_of(elements);
    if (count == capacity || next > INT32_MAX) return false;
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

// body(part, begin) for each chunk that falls to this block, begin counted from the part's start.
template <class Part, int capacity, class Body>
__device__ inline void for_chunks(const Table<Part, capacity>& table, const Body& body) {
  const uint32_t chunks = table.first[table.count];
  for (uint32_t i = blockIdx.x; i < chunks; i += gridDim.x) {
    const int part = table.part_of(i);
    body(table.parts[part], (i - table.first[part]) * chunk);
  }
}

}  // namespace npuzero::cuda
