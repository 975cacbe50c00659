// An instruction of one of the pipes, which types it is documented for, and which bytes of UB it touches.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace emulator {

constexpr int64_t block = 32;    // bytes that an address in UB is a multiple of
constexpr int64_t repeat = 256;  // bytes that one repeat of a vector instruction works on

namespace rounding {
enum : int { none, rint, floor, ceil, away, trunc };  // RoundMode's order
}  // namespace rounding

using FlagKey = std::array<int, 3>;  // from, to, id

struct Instruction {
  Op op;
  Pipe pipe;
  Site site;
  Operand target, sources[3];
  int64_t count = 0;
  double number = 0;
  int mode = 0;
  bool by_repeat = false;  // whole repeats that lie apart by `strides`, which else are those of what is dense
  Strides strides;
  uint8_t* global = nullptr;
  int64_t bytes = 0, pad = 0;
  FlagKey flag{};
  bool synchronizes() const { return op == Op::set_flag || op == Op::wait_flag || op == Op::release; }
};

std::string at(Site site);
const char* name_of(Pipe pipe);

// The documented combinations that the emulator knows; everything else is refused.
bool knows(const Instruction& i);

// From the first byte that it writes, or reads of each source, to the last.
int64_t write_bytes(const Instruction& i);
std::vector<std::pair<Operand, int64_t>> reads(const Instruction& i);

// The parts of that which it does touch: of the target, or of source k.
constexpr int target = -1;
std::vector<std::pair<Operand, int64_t>> parts(const Instruction& i, int k, const Operand& operand, int64_t bytes);

// Where in the target or in source k of an instruction the first byte of its lane n is, and how many there are.
std::pair<int64_t, int64_t> lane_of(const Instruction& i, int k, int64_t n);

}  // namespace emulator
