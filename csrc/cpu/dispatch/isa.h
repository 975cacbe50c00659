// Which instruction set the cpu kernels run on: the best of those built that this machine has, or the one asked for.
#pragma once

#include <string>
#include <vector>

namespace npuzero::cpu {

std::vector<std::string> built_isas();      // worst to best
std::vector<std::string> supported_isas();  // those of built_isas() that this machine can run
std::string current_isa();

// Fills the cpu slots of the kernel table. "auto" is the best. Error::Config if not built or not supported here.
void use_isa(const std::string& isa);

}  // namespace npuzero::cpu
