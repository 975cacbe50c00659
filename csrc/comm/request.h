// What a rank asks of its peers: a collective and its memory; and the signature by which ranks see that all ask the
// same. (Verb: the kind of a collective.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/region.h"
#include "core/view.h"

namespace npuzero::comm {

enum class Verb : int { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, barrier };
const char* name(Verb verb);
// Whether one rank alone brings what the others get: the root, which for a send is the sender of two ranks.
constexpr bool rooted(Verb verb) { return verb == Verb::broadcast || verb == Verb::send; }

// One collective on one rank. `numel` counts the shard (all_gather, reduce_scatter, all_to_all: one rank's part) or the
// buffer. Memory must stay until the operation is done.
struct Request {
  Verb verb = Verb::barrier;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t numel = 0;
  size_t itemsize = 1;
  Dtype wire = Dtype::u8, result = Dtype::u8;  // where it sums: the dtype that travels, and that of the sum
  bool accumulate = false;
  int root = 0;
  std::string dtype, tag;  // for the signature
};

Signature signature_of(const Request& request, uint64_t sequence);
bool same(const Signature& a, const Signature& b);
std::string describe(const Signature& signature);  // for people

}  // namespace npuzero::comm
