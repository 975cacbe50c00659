// Copying bytes that nobody reads soon: past the caches where the processor can, so that the memory written is not read
// first. Worth it only for results beyond the size of a cache: see stream_bytes.
#pragma once

#include <cstddef>

namespace npuzero::comm {

constexpr size_t stream_bytes = 8 << 20;  // results of one operation from which on streaming pays

// memcpy, if `streaming` past the caches. The writes are visible to others after the next release.
void copy(void* to, const void* from, size_t bytes, bool streaming);

}  // namespace npuzero::comm
