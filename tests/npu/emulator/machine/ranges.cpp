#include "machine/ranges.h"

#include <string>

#include "machine/instruction.h"
#include "run.h"

namespace emulator {

void Ranges::touch(uint64_t begin, uint64_t end, bool writes, Pipe pipe, int64_t sequence, const Clock& clock,
                   Site site) {
  split(begin);
  split(end);
  uint64_t next = begin;
  auto it = held_.lower_bound(begin);
  while (next < end) {
    if (it == held_.end() || it->first >= end || it->first > next) {
      const uint64_t until = it == held_.end() ? end : std::min(end, it->first);
      it = held_.emplace_hint(it, next, Held{until, {}});
    }
    Access& access = it->second.access;
    const auto ordered = [&](Pipe other, int64_t past) {
      return past <= clock.seen[other] || (other == pipe && past == sequence);  // in place
    };
    if (access.write && !ordered(access.writer, access.write)) {
      race(access.write_site, access.writer, writes ? "writes, then writes" : "writes, then reads", pipe, site);
    }
    if (writes) {
      for (int p = 0; p < pipes; ++p) {
        if (access.reads[p] && !ordered(static_cast<Pipe>(p), access.reads[p])) {
          race(access.read_sites[p], static_cast<Pipe>(p), "reads, then writes", pipe, site);
        }
      }
      access = Access{};
      access.write = sequence;
      access.writer = pipe;
      access.write_site = site;
    } else {
      access.reads[pipe] = sequence;
      access.read_sites[pipe] = site;
    }
    next = it->second.end;
    ++it;
  }
}

void Ranges::split(uint64_t at) {
  auto it = held_.upper_bound(at);
  if (it == held_.begin()) return;
  --it;
  if (it->first < at && at < it->second.end) {
    held_.emplace(at, it->second);
    it->second.end = at;
  }
}

void Ranges::race(Site earlier, Pipe first, const char* what, Pipe second, Site site) const {
  throw Fault("race", std::string(memory_) + ": " + name_of(first) + " at " + at(earlier) + " " + what + " with " +
                          name_of(second) + " at " + at(site) + ", and nothing orders them");
}

}  // namespace emulator
