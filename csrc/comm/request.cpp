#include "comm/request.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace npuzero::comm {
namespace {

template <size_t N>
void set_text(char (&to)[N], const std::string& from) {
  std::memset(to, 0, N);
  std::memcpy(to, from.data(), std::min(from.size(), N - 1));
}

}  // namespace

const char* name(Verb verb) {
  constexpr const char* names[] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all",
                                   "broadcast",  "send",           "barrier"};
  return names[static_cast<int>(verb)];
}

Signature signature_of(const Request& request, uint64_t sequence) {
  Signature signature;
  std::memset(&signature, 0, sizeof signature);  // padding too: signatures are compared as bytes
  signature.sequence = sequence;
  signature.numel = request.numel;
  signature.verb = static_cast<int32_t>(request.verb);
  signature.root = request.root;
  set_text(signature.dtype, request.dtype);
  set_text(signature.tag, request.tag);
  return signature;
}

bool same(const Signature& a, const Signature& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

std::string describe(const Signature& signature) {
  std::ostringstream text;
  text << name(static_cast<Verb>(signature.verb)) << " #" << signature.sequence;
  if (static_cast<Verb>(signature.verb) != Verb::barrier) text << " of " << signature.numel << " " << signature.dtype;
  if (static_cast<Verb>(signature.verb) == Verb::broadcast) text << " from position " << signature.root;
  if (signature.tag[0] != '\0') text << " tagged '" << signature.tag << "'";
  return text.str();
}

}  // namespace npuzero::comm
