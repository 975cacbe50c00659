// One parallel region over ranges laid end to end ("the line"), cut into equal static chunks whatever the ranges are.
// The threads are torch's: the same libgomp, and omp_get_max_threads(), so torch.set_num_threads is obeyed.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "core/numeric.h"
#include "cpu/write.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

constexpr int64_t serial_below = 32 * 1024;  // elements that are done sooner than a team of threads wakes up
// A range is divided where this many of its elements are a whole number of: that keeps two threads off one cache line
// where the buffers are aligned, and cuts no block of moments in codes.
constexpr int64_t chunk_multiple = 64;

// Calls body(range, begin, end), begin and end counted from the range's start, so that each element of each range is
// visited once, begin on a multiple of chunk_multiple. A Range has `line`, the elements of all ranges before it, and
// `count`; `total` is their sum.
template <class Range, class Body>
inline void for_line(const Range* ranges, int64_t range_count, int64_t total, const Body& body) {
  const int threads = total < serial_below ? 1 : omp_get_max_threads();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t team = omp_get_num_threads();
    const auto round_up = [](int64_t n) { return (n + chunk_multiple - 1) / chunk_multiple * chunk_multiple; };
    const int64_t share = round_up((total + team - 1) / team);
    const int64_t first = share * omp_get_thread_num();
    const int64_t last = first + share < total ? first + share : total;
    int64_t low = 0, high = range_count;  // the first range that ends after `first`
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ranges[middle].line + ranges[middle].count > first) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    for (int64_t i = low; i < range_count && ranges[i].line < last; ++i) {
      const Range& range = ranges[i];
      const int64_t begin = first > range.line ? round_up(first - range.line) : 0;
      const int64_t end = std::min(range.count, round_up(last - range.line));
      if (begin < end) body(range, begin, end);
    }
    finish_streams();
  }
}

// The same over one range of n elements: body(begin, end).
template <class Body>
inline void for_flat(int64_t n, const Body& body) {
  struct {
    int64_t line, count;
  } range{0, n};
  for_line(&range, 1, n, [&](const auto&, int64_t begin, int64_t end) { body(begin, end); });
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
