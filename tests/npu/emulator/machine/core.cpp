#include "machine/core.h"

#include <algorithm>
#include <cstring>

namespace emulator {
namespace {

constexpr int64_t groups = 16;  // of UB's banks: block i is in group i % groups, and a group gives one block a cycle

bool is_binary(const Instruction& i) { return i.op <= Op::bit_or || i.op == Op::compare || i.op == Op::select; }

}  // namespace

void Core::issue(const Instruction& instruction) {
  const Pipe pipe = instruction.pipe;
  const Site site = instruction.site;
  const int64_t sequence = order_.issue(pipe);
  Clock clock = order_.clock(pipe);
  if (instruction.op == Op::index) clock.seen[S] = order_.issued(S);  // CreateVecIndex orders its own stores before it
  const auto touch = [&](int k, const Operand& operand, int64_t bytes) {
    if (bytes <= 0) return;
    if (operand.span.at % block) refuse(site, "alignment", "an address in UB off a 32-byte boundary");
    ub_.inside(site, operand.span, bytes);
    for (const auto& [part, size] : parts(instruction, k, operand, bytes)) {
      ub_ranges_.touch(part.span.at, part.span.at + size, k == target, pipe, sequence, clock, site);
    }
  };
  // What it writes first: where it works in place, its own read would hide an earlier one.
  touch(target, instruction.target, write_bytes(instruction));
  int source = 0;
  for (const auto& [operand, bytes] : reads(instruction)) touch(source++, operand, bytes);
  if (instruction.global) {
    const auto begin = reinterpret_cast<uint64_t>(instruction.global);
    const bool stores = instruction.op == Op::store;
    setting_.check_extent(site, begin, instruction.bytes, stores);
    gm_ranges_.touch(begin, begin + instruction.bytes, stores, pipe, sequence, clock, site);
    (stores ? counts_.stored : counts_.loaded) += instruction.bytes;
    counts_.moves += 1;
  }
  count(instruction);
  pipes_.push(instruction);
}

void Core::scalar_local(Site site, const Operand& operand, void* value, bool writes) {
  const int bytes = bytes_of(operand.type);
  const Span span = operand.span;
  ub_.inside(site, span, bytes);
  const int64_t sequence = order_.scalar_step();
  ub_ranges_.touch(span.at, span.at + bytes, writes, S, sequence, order_.clock(S), site);
  if (writes) {
    ub_.write(span, value, bytes);
  } else {
    if (!ub_.all_defined(span, bytes)) refuse(site, "poison", "GetValue of memory that nothing has written");
    std::memcpy(value, ub_.at<uint8_t>(operand), bytes);
  }
  counts_.scalar_accesses += 1;
}

void Core::scalar_global(Site site, const void* from, void* value, int bytes) {
  const auto begin = reinterpret_cast<uint64_t>(from);
  setting_.check_extent(site, begin, bytes, false);
  const int64_t sequence = order_.scalar_step();
  gm_ranges_.touch(begin, begin + bytes, false, S, sequence, order_.clock(S), site);
  std::memcpy(value, from, bytes);
}

void Core::finish() {
  pipes_.drain();
  const Site end{"the end of the kernel", 0};
  order_.check_flags(end);
  queues_.check_freed(end);
  ub_.check_red_zones(end);
  counts_.ub_bytes = std::max(counts_.ub_bytes, ub_.used());
}

void Core::count(const Instruction& i) {
  if (i.pipe != V) return;
  int64_t widest = bytes_of(i.target.type);
  for (const auto& [operand, bytes] : reads(i)) widest = std::max<int64_t>(widest, bytes_of(operand.type));
  const int64_t repeats = i.op == Op::reduce_max ? i.count : (i.count * widest + repeat - 1) / repeat;
  counts_.vector_instructions += 1;
  counts_.steps += order_.first_after_wait();
  (i.op == Op::div || i.op == Op::sqrt ? counts_.slow_repeats : counts_.repeats) += repeats;
  if (is_binary(i)) {
    for (int64_t r = 0; r < repeats; ++r) counts_.conflicts += conflicts(i, r);
  }
}

// Whether any two blocks that a repeat takes of its two sources are in one group.
bool Core::conflicts(const Instruction& i, int64_t r) const {
  const int64_t left = i.count * bytes_of(i.sources[0].type) - r * repeat;
  const int64_t blocks = (std::min(left, repeat) + block - 1) / block;
  const int64_t one = ub_.device_block(i.site, i.sources[0].span) + r * i.strides.first;
  const int64_t other = ub_.device_block(i.site, i.sources[1].span) + r * i.strides.second;
  const int64_t apart = ((other - one) % groups + groups) % groups;
  return apart < blocks || (!i.strides.second_is_block && groups - apart < blocks);
}

}  // namespace emulator
