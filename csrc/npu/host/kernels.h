// The npu slots of the kernel table.
#pragma once

#include <map>
#include <string>

namespace npuzero::npu {

// Fills them with the kernels of `library`: a shared object that has for each kernel K of npu/launch.h a C function
// aclrtlaunch_K(cores, stream, table), which is what both ways of building kernels with CANN leave
// (npu/CMakeLists.txt). It is loaded, and CANN with it, at the first launch. An empty name empties the slots.
void use_kernels(const std::string& library);

// The library in use; empty where there is none.
std::string kernels_in_use();

// Each kernel's largest launch so far, in vector cores.
std::map<std::string, int> largest_launches();

}  // namespace npuzero::npu
