// What vector instructions compute.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/ub.h"

namespace emulator {

// Computes an instruction. Where the device leaves a lane's result undefined, its entry of `lanes` becomes 0.
void run_op(const Instruction& i, Ub& ub, std::vector<uint8_t>& lanes);

}  // namespace emulator
