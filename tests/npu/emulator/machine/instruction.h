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
constexpr int dense = -1;

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
  int block_step = dense;  // or of a second source that has one block a repeat, blocks to the next repeat's
  uint8_t* global = nullptr;
  int64_t bytes = 0, pad = 0;
  FlagKey flag{};
  bool synchronizes() const { return op == Op::set_flag || op == Op::wait_flag || op == Op::release; }
};

std::string at(Site site);
const char* name_of(Pipe pipe);

// The documented combinations that the emulator knows; everything else is refused.
bool knows(const Instruction& i);

int64_t write_bytes(const Instruction& i);
std::vector<std::pair<Operand, int64_t>> reads(const Instruction& i);

// Of a second source with one block a repeat, the block that lane k reads.
inline int64_t block_at(const Instruction& i, int64_t k) { return k * bytes_of(i.target.type) / repeat * i.block_step; }

// Where in source k of an instruction the first byte of its lane n is, and how many there are.
std::pair<int64_t, int64_t> lane_of(const Instruction& i, size_t k, int64_t n);

}  // namespace emulator
