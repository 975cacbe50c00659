// Moments in 8 bits, as ops/flat_adam.h has them: codes, and an exponent for each block of 64 elements, which is one
// repeat of the vector unit in f32. Bytes come and go by way of f16 and f32, since Cast knows no other; the rest is
// 32-bit integers that cannot overflow. What follows from an exponent is computed in a lane for each block, spread to a
// datablock for each (Brcb), and read there by all of the block's repeat.
#pragma once

#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kLost = 255;          // the exponent of a block that was not finite
constexpr int32_t kLeastExponent = 16;  // of a block that was rounded
constexpr int32_t kDropped = 19;        // bits of f32's mantissa that a code lacks
constexpr int32_t kNan = 0x7fc00000;

class Codes {
 public:
  // For tiles of at most `tile` elements.
  __aicore__ inline void Init(TPipe& pipe, int32_t tile) {
    stride_ = RoundUp(tile / kCodeBlock, kSpreadLanes);
    pipe.InitBuffer(lanes_, kLanes * stride_ * 4);
    pipe.InitBuffer(spread_, kLanes * stride_ * kBlockBytes);
  }

  // The codes at the begin of `place` to f32 in all of it. t and rest are room; exponents may lie in `place` too.
  __aicore__ inline void Widen(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                               const LocalTensor<float>& t, const LocalTensor<float>& rest, bool with_sign,
                               int32_t count) {
    const int32_t blocks = Blocks(count);
    const LocalTensor<int32_t> value = place.ReinterpretCast<int32_t>(), code = rest.ReinterpretCast<int32_t>();
    const LocalTensor<uint32_t> sign = t.ReinterpretCast<uint32_t>();
    FromBytes(code, t.ReinterpretCast<half>(), place, count);
    FromBytes(Lane(0), Lane(1).ReinterpretCast<half>(), exponents, blocks);
    Adds(Lane(1), Lane(0), -Span(with_sign), blocks);
    Adds(Lane(2), Lane(0), 1 - kLost, blocks);
    PipeBarrier<PIPE_V>();
    Muls(Lane(1), Lane(1), 16, blocks);
    Maxs(Lane(2), Lane(2), 0, blocks);
    PipeBarrier<PIPE_V>();
    Muls(Lane(2), Lane(2), kNan, blocks);
    PipeBarrier<PIPE_V>();
    Spread(1, blocks);
    Spread(2, blocks);
    if (with_sign) {
      ShiftRight(sign, code.ReinterpretCast<uint32_t>(), 7u, count);
      PipeBarrier<PIPE_V>();
      Muls(value, sign.ReinterpretCast<int32_t>(), -128, count);
      PipeBarrier<PIPE_V>();
      ShiftLeft(sign, sign, 31u, count);
      Add(code, code, value, count);
      PipeBarrier<PIPE_V>();
    }
    Mins(value, code, 1, count);  // no magnitude is zero, whatever the exponent
    PipeBarrier<PIPE_V>();
    Add(code, code, OfBlock(1), kWhole, Repeats(blocks), ByBlock());
    PipeBarrier<PIPE_V>();
    ShiftLeft(code, code, kDropped, count);
    PipeBarrier<PIPE_V>();
    Mul(value, value, code, count);
    PipeBarrier<PIPE_V>();
    if (with_sign) {
      Or(value.ReinterpretCast<uint16_t>(), value.ReinterpretCast<uint16_t>(), sign.ReinterpretCast<uint16_t>(),
         2 * count);
      PipeBarrier<PIPE_V>();
    }
    Or(value.ReinterpretCast<uint16_t>(), value.ReinterpretCast<uint16_t>(), OfBlock(2).ReinterpretCast<uint16_t>(),
       2 * kWhole, Repeats(blocks), ByBlock());
  }

  // And back, to nearest, ties away from zero;
  __aicore__ inline void RoundAway(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                   const LocalTensor<float>& t, const LocalTensor<float>& rest, bool with_sign,
                                   int32_t count) {
    Magnitudes(place.ReinterpretCast<float>(), t, with_sign, count);
    Adds(rest.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), 1 << (kDropped - 1), count);
    Encode(place, exponents, t, rest, with_sign, count);
  }

  // or stochastically, by the draws of its elements that are in `rest`.
  __aicore__ inline void RoundByChance(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                       const LocalTensor<float>& t, const LocalTensor<float>& rest, int32_t count) {
    const LocalTensor<int32_t> bits = rest.ReinterpretCast<int32_t>();
    ShiftLeft(bits, bits, kDropped - 16, count);
    Magnitudes(place.ReinterpretCast<float>(), t, false, count);
    Add(bits, t.ReinterpretCast<int32_t>(), bits, count);
    Encode(place, exponents, t, rest, false, count);
  }

 private:
  static constexpr int32_t kLanes = 4;        // arrays of a lane for each block
  static constexpr int32_t kSpreadLanes = 8;  // that one repeat of Brcb spreads
  static constexpr uint64_t kWhole = kRepeat;

  __aicore__ inline int32_t Blocks(int32_t count) { return (count + kCodeBlock - 1) / kCodeBlock; }
  __aicore__ inline int32_t Span(bool with_sign) { return with_sign ? 7 : 15; }
  __aicore__ inline uint8_t Repeats(int32_t blocks) { return static_cast<uint8_t>(blocks); }
  // The second source is one datablock for a repeat, the next one for the next.
  __aicore__ inline BinaryRepeatParams ByBlock() { return BinaryRepeatParams(1, 1, 0, 8, 8, 1); }

  __aicore__ inline LocalTensor<int32_t> Lane(int32_t i) { return lanes_.Get<int32_t>()[i * stride_]; }
  __aicore__ inline LocalTensor<int32_t> OfBlock(int32_t i) {
    return spread_.Get<int32_t>()[i * stride_ * kSpreadLanes];
  }
  __aicore__ inline void Spread(int32_t i, int32_t blocks) {
    const int32_t repeats = RoundUp(blocks, kSpreadLanes) / kSpreadLanes;
    Brcb(OfBlock(i), Lane(i), static_cast<uint8_t>(repeats), BrcbRepeatParams(1, 8));
  }

  __aicore__ inline void FromBytes(const LocalTensor<int32_t>& to, const LocalTensor<half>& room,
                                   const LocalTensor<uint8_t>& from, int32_t count) {
    Cast(room, from, RoundMode::CAST_NONE, count);
    PipeBarrier<PIPE_V>();
    Cast(to.ReinterpretCast<float>(), room, RoundMode::CAST_NONE, count);
    PipeBarrier<PIPE_V>();
    Cast(to, to.ReinterpretCast<float>(), RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
  }

  // Uses `from` up.
  __aicore__ inline void ToBytes(const LocalTensor<uint8_t>& to, const LocalTensor<half>& room,
                                 const LocalTensor<int32_t>& from, int32_t count) {
    Cast(from.ReinterpretCast<float>(), from, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Cast(room, from.ReinterpretCast<float>(), RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Cast(to, room, RoundMode::CAST_RINT, count);
  }

  // t = the patterns of x without their sign, infinity's for NaN. Of each block, in lanes: its exponent (0), 16 *
  // (exponent - span) (1), whether it is kept (2), and one less than the least pattern that is no zero (3); but for the
  // exponent spread to what OfBlock reads.
  __aicore__ inline void Magnitudes(const LocalTensor<float>& x, const LocalTensor<float>& t, bool with_sign,
                                    int32_t count) {
    const int32_t blocks = Blocks(count), span = Span(with_sign);
    if (count % kCodeBlock != 0) {
      Duplicate(t[count / kCodeBlock * kCodeBlock], 0.0f, kCodeBlock);
      PipeBarrier<PIPE_V>();
    }
    Abs(t, x, count);
    PipeBarrier<PIPE_V>();
    Mins(t.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kInfinity, count);
    PipeBarrier<PIPE_V>();
    WholeReduceMax(Lane(0).ReinterpretCast<float>(), t, kRepeat, blocks, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Adds(Lane(0), Lane(0), (1 << kDropped) - 1, blocks);
    PipeBarrier<PIPE_V>();
    ShiftRight(Lane(0), Lane(0), 23, blocks);
    PipeBarrier<PIPE_V>();
    Maxs(Lane(0), Lane(0), kLeastExponent, blocks);
    PipeBarrier<PIPE_V>();
    Adds(Lane(1), Lane(0), -span, blocks);
    Adds(Lane(2), Lane(0), -kLost, blocks);
    Adds(Lane(3), Lane(0), -span - 1, blocks);
    PipeBarrier<PIPE_V>();
    Muls(Lane(1), Lane(1), 16, blocks);
    Maxs(Lane(2), Lane(2), -1, blocks);
    ShiftLeft(Lane(3), Lane(3), 23, blocks);
    PipeBarrier<PIPE_V>();
    Muls(Lane(2), Lane(2), -1, blocks);
    Adds(Lane(3), Lane(3), -1, blocks);
    PipeBarrier<PIPE_V>();
    for (int32_t i = 1; i < kLanes; ++i) Spread(i, blocks);
  }

  // rest: magnitudes and what was added to them below a code's last bit.
  __aicore__ inline void Encode(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                const LocalTensor<float>& t, const LocalTensor<float>& rest, bool with_sign,
                                int32_t count) {
    const int32_t blocks = Blocks(count);
    const LocalTensor<int32_t> code = rest.ReinterpretCast<int32_t>(), other = t.ReinterpretCast<int32_t>();
    const LocalTensor<uint32_t> sign = t.ReinterpretCast<uint32_t>();
    PipeBarrier<PIPE_V>();
    ShiftRight(code, code, kDropped, count);
    if (with_sign) {
      Sub(other, other, OfBlock(3), kWhole, Repeats(blocks), ByBlock());
      PipeBarrier<PIPE_V>();
      Maxs(other, other, 0, count);
    }
    PipeBarrier<PIPE_V>();
    Mins(other, other, 1, count);  // 0 where the code's magnitude is
    Sub(code, code, OfBlock(1), kWhole, Repeats(blocks), ByBlock());
    PipeBarrier<PIPE_V>();
    Maxs(code, code, 1, count);
    PipeBarrier<PIPE_V>();
    Mul(code, code, other, count);
    PipeBarrier<PIPE_V>();
    if (with_sign) {
      ShiftRight(sign, place.ReinterpretCast<uint32_t>(), 31u, count);
      PipeBarrier<PIPE_V>();
      ShiftLeft(sign, sign, 7u, count);
      PipeBarrier<PIPE_V>();
      Add(code, code, other, count);
      PipeBarrier<PIPE_V>();
    }
    Mul(code, code, OfBlock(2), kWhole, Repeats(blocks), ByBlock());
    PipeBarrier<PIPE_V>();
    ToBytes(place, t.ReinterpretCast<half>(), code, count);
    ToBytes(exponents, Lane(1).ReinterpretCast<half>(), Lane(0), blocks);
  }

  TBuf<TPosition::VECCALC> lanes_, spread_;
  int32_t stride_;
};

}  // namespace npu
}  // namespace npuzero
