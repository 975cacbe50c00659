// The system's calls that a store makes, and faults in their place, for tests: a full disk, a bad sector, half a
// transfer. Without faults it costs one look at a flag per call.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace npuzero::io {

enum class Call { nameless, direct, allocate, read, write };

// After `after` calls of its kind, the next `times` (-1: all) fail with `error`; or, where that is 0, move at most
// `most` bytes, and `flip`: one bit of what was read is another.
struct Fault {
  Call call;
  int64_t after = 0, times = 1;
  int error = 0;
  size_t most = SIZE_MAX;
  bool flip = false;
};

void inject(const Fault& fault);
void heal();  // no faults any more

// As the system's: -1 and errno where they fail. A signal (EINTR) is the caller's to deal with.
int open_nameless(const std::string& folder);  // O_TMPFILE
int make_direct(int file);                     // O_DIRECT from now on
int allocate(int file, int64_t bytes);
ssize_t read_at(int file, void* data, size_t bytes, int64_t offset);
ssize_t write_at(int file, const void* data, size_t bytes, int64_t offset);

}  // namespace npuzero::io
