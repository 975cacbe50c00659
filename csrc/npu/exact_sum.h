// A sum of float32 numbers as an integer of many digits: without error whatever comes, and rounded once, to a float64.
#pragma once

#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kDigits = 24;    // of 32 bits each
constexpr int32_t kLowest = -448;  // exponent of the lowest digit's unit

// A sum without error, kept in digits that are not carried until the end, and what is not finite.
struct ExactSum {
  int64_t digits[kDigits];
  int64_t bad;
  int64_t nans;
};

__aicore__ inline void Clear(ExactSum& sum) {
  for (int32_t i = 0; i < kDigits; ++i) sum.digits[i] = 0;
  sum.bad = 0;
  sum.nans = 0;
}

// sum += the f32 of this pattern * 2^exponent
__aicore__ inline void AddPattern(ExactSum& sum, uint32_t pattern, int32_t exponent) {
  const int32_t field = static_cast<int32_t>((pattern >> 23) & 0xff);
  const uint64_t mantissa = (pattern & 0x7fffff) | (field == 0 ? 0u : 0x800000u);
  const int32_t place = (field == 0 ? 1 : field) - 150 + exponent - kLowest;
  const uint64_t shifted = mantissa << (place & 31);
  const int64_t low = static_cast<int64_t>(shifted & 0xffffffff), high = static_cast<int64_t>(shifted >> 32);
  const bool negative = (pattern >> 31) != 0;
  sum.digits[place >> 5] += negative ? -low : low;
  sum.digits[(place >> 5) + 1] += negative ? -high : high;
}

// The float64 pattern of a number that is not negative, rounded to nearest even.
__aicore__ inline uint64_t DoubleOf(ExactSum& sum) {
  int32_t top = -1;
  for (int32_t i = 0; i < kDigits; ++i) {
    if (i + 1 < kDigits) sum.digits[i + 1] += sum.digits[i] >> 32;
    sum.digits[i] &= 0xffffffff;
    if (sum.digits[i] != 0) top = i;
  }
  if (top < 0) return 0;
  uint64_t mantissa = static_cast<uint64_t>(sum.digits[top]) << 32;
  if (top > 0) mantissa |= static_cast<uint64_t>(sum.digits[top - 1]);
  uint64_t rest = top > 1 ? static_cast<uint64_t>(sum.digits[top - 2]) << 32 : 0;
  for (int32_t i = 0; i + 2 < top; ++i) {
    if (sum.digits[i] != 0) rest |= 1;
  }
  int32_t exponent = kLowest + 32 * (top - 1) + 63;  // of the mantissa's highest bit
  while ((mantissa >> 63) == 0) {
    mantissa = (mantissa << 1) | (rest >> 63);
    rest <<= 1;
    exponent -= 1;
  }
  const uint64_t dropped = mantissa & 0x7ff;
  uint64_t kept = mantissa >> 11;
  if (dropped > 0x400 || (dropped == 0x400 && (rest != 0 || (kept & 1) != 0))) kept += 1;
  // A carry out of the 53 bits leaves them zero and moves the exponent, by plain addition.
  return (static_cast<uint64_t>(exponent + 1022) << 52) + kept;
}

__aicore__ inline uint64_t DoubleOfCount(int64_t count) {
  ExactSum sum;
  Clear(sum);
  sum.digits[-kLowest / 32] = count & 0xffffffff;
  sum.digits[-kLowest / 32 + 1] = count >> 32;
  return DoubleOf(sum);
}

// What the scalar unit has put into UB goes to GM.
__aicore__ inline void StoreWords(uint64_t to, const LocalTensor<uint8_t>& from, int32_t bytes, TEventID written) {
  SetFlag<HardEvent::S_MTE3>(written);
  WaitFlag<HardEvent::S_MTE3>(written);
  npu::Store(to, from, bytes);
}

__aicore__ inline void SetLong(const LocalTensor<uint32_t>& words, int32_t index, uint64_t value) {
  words.SetValue(2 * index, static_cast<uint32_t>(value));
  words.SetValue(2 * index + 1, static_cast<uint32_t>(value >> 32));
}

__aicore__ inline uint64_t GetLong(const LocalTensor<uint32_t>& words, int32_t index) {
  return words.GetValue(2 * index) | static_cast<uint64_t>(words.GetValue(2 * index + 1)) << 32;
}

__aicore__ inline void StoreResult(uint64_t out, ExactSum& sum, const LocalTensor<uint8_t>& room, TEventID written) {
  const LocalTensor<uint32_t> words = room.ReinterpretCast<uint32_t>();
  const uint64_t bad = DoubleOfCount(sum.bad);
  const uint64_t total = sum.nans != 0 ? 0x7ff8000000000000u : (sum.bad != 0 ? 0x7ff0000000000000u : DoubleOf(sum));
  npu::SetLong(words, 0, total);
  npu::SetLong(words, 1, bad);
  npu::StoreWords(out, room, 16, written);
}

}  // namespace npu
}  // namespace npuzero
