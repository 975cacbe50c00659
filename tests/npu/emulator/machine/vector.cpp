#include "machine/vector.h"

#include <algorithm>
#include <vector>

#include "machine/arithmetic.h"

namespace emulator {
namespace {

bool chooses(const Instruction& i) { return i.op == Op::select || i.op == Op::select_scalar; }

// For each lane of the result, whether all that it is computed of is defined.
std::vector<uint8_t> defined_lanes(const Instruction& i, Ub& ub) {
  std::vector<uint8_t> lanes(i.count, defined);
  const auto touched = reads(i);
  for (size_t k = 0; k < touched.size(); ++k) {
    const Operand& operand = touched[k].first;
    const bool mask = chooses(i) && k + 1 == touched.size();
    if (ub.all_defined(operand.span, touched[k].second)) continue;
    for (int64_t n = 0; n < i.count; ++n) {
      const auto [first, size] = mask ? std::pair<int64_t, int64_t>{n / 8, 1} : lane_of(i, static_cast<int>(k), n);
      const uint8_t* shadow = ub.shadow(operand.span) + first;
      bool fine = true;
      for (int b = 0; b < size; ++b) fine &= mask ? (shadow[0] >> (n % 8) & 1) != 0 : shadow[b] == defined;
      // A lane of Select is what was chosen.
      if (chooses(i) && !mask) {
        const bool first_chosen = ub.at<uint8_t>(i.sources[2])[n / 8] >> (n % 8) & 1;
        fine |= first_chosen != (k == 0);
      }
      if (!fine) lanes[n] = 0;
    }
  }
  return lanes;
}

// Of masks put together, every bit is its own: which ones are defined.
std::vector<uint8_t> defined_bits(const Instruction& i, Ub& ub) {
  std::vector<uint8_t> bits;
  if ((i.op != Op::bit_and && i.op != Op::bit_or) || i.by_repeat) return bits;
  const auto *one = ub.shadow(i.sources[0].span), *other = ub.shadow(i.sources[1].span);
  for (int64_t n = 0; n < write_bytes(i); ++n) bits.push_back(one[n] & other[n]);
  return bits;
}

void mark(const Instruction& i, Ub& ub, const std::vector<uint8_t>& lanes) {
  uint8_t* shadow = ub.shadow(i.target.span);
  if (i.op == Op::compare || i.op == Op::compare_scalar) {
    for (int64_t n = 0; n < i.count; n += 8) {
      uint8_t bits = 0;
      for (int b = 0; b < 8; ++b) bits |= static_cast<uint8_t>((n + b < i.count && lanes[n + b]) << b);
      shadow[n / 8] = bits;
    }
    return;
  }
  uint8_t together = defined;
  for (int64_t n = 0; n < i.count; ++n) together &= lanes[n];
  if (together == defined && !i.by_repeat) {
    std::fill_n(shadow, write_bytes(i), defined);
    return;
  }
  for (int64_t n = 0; n < i.count; ++n) {
    const auto [first, size] = lane_of(i, target, n);
    const bool beside = i.target.type == Type::i4 && n % 2;  // of the byte that the lane before it is in
    std::fill_n(shadow + first, size, beside ? lanes[n] & lanes[n - 1] : lanes[n]);
  }
}

}  // namespace

void compute(const Instruction& i, Ub& ub) {
  // Before it runs: where it works in place, its result is where its sources were.
  std::vector<uint8_t> lanes = defined_lanes(i, ub);
  const std::vector<uint8_t> bits = defined_bits(i, ub);
  run_op(i, ub, lanes);
  mark(i, ub, lanes);
  std::copy(bits.begin(), bits.end(), ub.shadow(i.target.span));
}

}  // namespace emulator
