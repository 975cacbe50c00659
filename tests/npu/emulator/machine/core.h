// One emulated core of a 2201, after the documentation: a scalar unit that runs the kernel's own code and issues
// instructions into the queues of three pipes (V, MTE2, MTE3), which run by themselves. Two things are kept apart:
//
//   what must be so    at issue: alignment, bounds, types, queues and flags, and for every byte of UB and GM whether an
//                      earlier access on which this one depends is certain to be over (clocks, as race detectors keep
//                      them). A race is a fault here whether values suffer or not.
//   what happens       at execution, in an order that a schedule chooses among those that pipes and flags allow.
//
// Instructions of one pipe are in flight together until a barrier or a flag says otherwise, as on a 2201. What the
// device leaves undefined (memory nobody wrote, integer overflow) is undefined here, element by element, and a fault
// where it would reach GM, the scalar unit or an address.
#pragma once

#include "machine/queues.h"

namespace emulator {

class Core {
 public:
  Core(const Setting& setting, Counts& counts, int index) : setting_(setting), counts_(counts), index_(index) {}

  int index() const { return index_; }
  Ub& ub() { return ub_; }
  Order& order() { return order_; }
  Queues& queues() { return queues_; }
  const Ranges& gm_ranges() const { return gm_ranges_; }

  void issue(const Instruction& instruction);
  void scalar_local(Site site, const Operand& operand, void* value, bool writes);
  void scalar_global(Site site, const void* from, void* value, int bytes);
  void finish();

 private:
  void count(const Instruction& i);
  bool conflicts(const Instruction& i, int64_t r) const;

  const Setting& setting_;
  Counts& counts_;
  int index_;
  Ub ub_;
  Pipes pipes_{setting_, ub_, index_};
  Order order_{setting_, pipes_};
  Queues queues_{ub_, order_, pipes_};
  Ranges ub_ranges_{"UB"}, gm_ranges_{"GM"};
};

}  // namespace emulator
