// How a kernel is run: the schedule, what of it is left out, what it may touch, and what came of it.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "machine.h"

namespace emulator {

// A thing the device would not have forgiven. `check` is which of the emulator's checks found it: alignment, bounds,
// capacity, cores, dtype, flag, overlap, poison, queue, race, repeat.
class Fault : public std::runtime_error {
 public:
  Fault(const char* check, const std::string& text) : std::runtime_error(std::string(check) + ": " + text) {}
};

// in_order: as issued. stores_late, loads_late: that pipe only when something needs it. loads_early: everything but
// loads only when something needs it. random: any pipe that can, and instructions in flight together in any order.
enum class Schedule : int { in_order, stores_late, loads_early, loads_late, random };

// What a synchronization loses: nothing, all of it, or the order alone (its bookkeeping stays balanced).
enum class Drop : int { none, all, order };

struct Extent {
  uint64_t end;
  bool writable;
};

struct Setting {
  int cores = 3;
  Schedule schedule = Schedule::in_order;
  int64_t seed = 0;
  Drop drop = Drop::none;
  std::string dropped;                                                   // file:line
  std::map<uint64_t, Extent> extents;                                    // of GM, by their begin
  mutable std::map<std::pair<std::string, std::string>, int64_t> sites;  // (file:line, call) of synchronizations

  void check_extent(Site site, uint64_t begin, int64_t bytes, bool writes) const;
};

// conflicts: repeats whose two sources meet in a group of UB's banks. steps: vector instructions that wait for an
// earlier one, after a barrier or a flag.
struct Counts {
  int64_t loaded, stored, moves, vector_instructions, repeats, slow_repeats, conflicts, steps, scalar_accesses,
      ub_bytes, launches;
};

using Kernel = void (*)(uint8_t* table);

// Runs a kernel's blocks one after the other; throws a Fault.
void run(Kernel kernel, int blocks, uint8_t* table, const Setting& setting, Counts& counts);

}  // namespace emulator
