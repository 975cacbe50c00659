// A vector instruction at execution: what it computes, and which lanes of it are defined.
#pragma once

#include "machine/ub.h"

namespace emulator {

void compute(const Instruction& i, Ub& ub);

}  // namespace emulator
