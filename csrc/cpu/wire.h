// Messages of core/wire.h: where their blocks lie, and a walk over them by several threads.
#pragma once

#include <algorithm>

#include "core/wire.h"
#include "cpu/denormals.h"
#include "cpu/parallel.h"

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// One message of `each` elements.
template <int bits, class Byte>
struct Message {
  Byte* codes;
  Byte* scales;  // a bf16 each

  Message(void* messages, int64_t index, int64_t each)
      : codes(static_cast<Byte*>(messages) + index * message_bytes(each, bits)),
        scales(codes + code_bytes(each, bits)) {}
};

// Calls body(piece, begin, end), begin and end counted from the piece's start, on whole blocks, so that each element of
// n in so many pieces is visited once.
template <int bits, class Body>
inline void for_pieces(int64_t n, int64_t pieces, const Body& body) {
  constexpr int64_t block = wire_block(bits);
  const int64_t each = n / pieces;
  const auto round_up = [](int64_t i) { return (i + block - 1) / block * block; };
  for_flat(n, [&](int64_t begin, int64_t end) {
    const WithDenormals scope;
    const int64_t last = round_up(end);
    for (int64_t i = round_up(begin); i < last;) {
      const int64_t piece = i / each, start = piece * each, stop = std::min(last, start + each);
      body(piece, i - start, stop - start);
      i = stop;
    }
  });
}

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
