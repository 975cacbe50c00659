// What is asked of a library of kernels before it is relied on.
#pragma once

#include <string>

#include "npu/launch.h"

namespace npuzero::npu {

// Runs every op on a few numbers and compares with the CPU's kernels; waits for the stream. A launch's own status is
// not enough: a launch function that CANN before 9.0 generates returns success where its kernel could not be
// registered, and nothing runs.
//
// Error::KernelUnavailable unless all of it is right: says which ops are wrong, and whether anything was written.
void check_first_use(const std::string& library, Stream stream, int cores, Launcher& launcher);

}  // namespace npuzero::npu
