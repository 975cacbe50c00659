// Which accesses of memory are certain to be over before which others: clocks, and who touched which bytes last.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

#include "machine.h"

namespace emulator {

struct Clock {
  std::array<int64_t, pipes> seen{};  // of each pipe, the last instruction that is certain to be over

  void merge(const Clock& other) {
    for (int p = 0; p < pipes; ++p) seen[p] = std::max(seen[p], other.seen[p]);
  }
};

// Who touched which bytes last.
class Ranges {
 public:
  struct Access {
    int64_t write = 0, reads[pipes] = {};
    Pipe writer = S;
    Site write_site{}, read_sites[pipes] = {};
  };

  explicit Ranges(const char* memory) : memory_(memory) {}

  // An instruction's access of [begin, end); a fault where it does not come after every earlier one that it meets.
  void touch(uint64_t begin, uint64_t end, bool writes, Pipe pipe, int64_t sequence, const Clock& clock, Site site);

  template <class Body>
  void each(const Body& body) const {
    for (const auto& [begin, held] : held_) body(begin, held.end, held.access);
  }

 private:
  struct Held {
    uint64_t end;
    Access access;
  };

  void split(uint64_t at);
  [[noreturn]] void race(Site earlier, Pipe first, const char* what, Pipe second, Site site) const;

  const char* memory_;
  std::map<uint64_t, Held> held_;
};

}  // namespace emulator
