// Moments in 8 bits, as core/flat.h has them: codes, and an exponent for each block of 64 elements, which is one
// repeat of the vector unit in f32. A value is a number of f16 that follows from its code alone, times a power of two
// that follows from its block's exponent; to round, elements are scaled so that their block's exponent is one and the
// same. So what is done for every element is done in 16 bits as soon as can be, twice as many a repeat, and with
// integers that cannot overflow. What follows from an exponent is computed in a lane for each block, spread to a
// datablock for each (Brcb), and read there by all of the block's repeat.
#pragma once

#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kLeastExponent = 16;  // of a block that was rounded
constexpr int32_t kLost = 255;          // the exponent of a block that was not finite
constexpr int32_t kDropped = 19;        // bits of f32's mantissa that a code lacks
constexpr int32_t kScaled = 128;        // the exponent of a block when its elements are rounded

class Codes {
 public:
  // For tiles of at most `tile` elements.
  __aicore__ inline void Init(TPipe& pipe, int32_t tile) {
    tile_ = tile;
    stride_ = RoundUp(tile / kCodeBlock, kSpreadLanes);
    pipe.InitBuffer(lanes_, kLanes * stride_ * 4);
    pipe.InitBuffer(spread_, kSpreads * stride_ * kBlockBytes);
    pipe.InitBuffer(masks_, 2 * kBlockBytes);
    Duplicate(Mask(0), static_cast<uint16_t>(0x7f), kBlockBytes / 2);
    Duplicate(Mask(1), static_cast<uint16_t>(0x7fff), kBlockBytes / 2);
  }

  // The codes at the begin of `place` to f32 in all of it. t and rest are room; exponents may lie in `place` too.
  __aicore__ inline void Widen(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                               const LocalTensor<float>& t, const LocalTensor<float>& rest, bool with_sign,
                               int32_t count) {
    const int32_t blocks = Blocks(count);
    const LocalTensor<int16_t> magnitude = t.ReinterpretCast<int16_t>(), code = rest.ReinterpretCast<int16_t>();
    const LocalTensor<int16_t> none = code[tile_];
    const LocalTensor<float> factor = Lane(0).ReinterpretCast<float>(), scale = Lane(1).ReinterpretCast<float>();
    const LocalTensor<float> nan = Lane(2).ReinterpretCast<float>();
    const LocalTensor<half> whole = (with_sign ? magnitude : code).ReinterpretCast<half>();
    Cast(whole, place, RoundMode::CAST_NONE, count);
    Cast(Lane(1).ReinterpretCast<half>(), exponents, RoundMode::CAST_NONE, blocks);
    PipeBarrier<PIPE_V>();
    Cast(with_sign ? code : magnitude, whole, RoundMode::CAST_RINT, count);
    Cast(factor, Lane(1).ReinterpretCast<half>(), RoundMode::CAST_NONE, blocks);
    PipeBarrier<PIPE_V>();
    if (with_sign) And16(magnitude, code, 0, count);
    Cast(Lane(0), factor, RoundMode::CAST_RINT, blocks);
    PipeBarrier<PIPE_V>();
    if (with_sign) Sub(code, code, magnitude, count);
    Mins(none, magnitude, static_cast<int16_t>(1), count);  // no magnitude is zero, whatever the exponent
    ShiftLeft(Lane(0), Lane(0), 23, blocks);
    PipeBarrier<PIPE_V>();
    // The magnitude's bits are f16's exponent and the upper ones of its mantissa, from 8 with a sign, else from 1 on;
    // 2^(exponent - 127) is infinity where the block is lost.
    if (with_sign) ShiftLeft(code.ReinterpretCast<uint16_t>(), code.ReinterpretCast<uint16_t>(), kEight, count);
    ShiftLeft(none, none, static_cast<int16_t>(with_sign ? 13 : 10), count);
    ShiftLeft(magnitude, magnitude, static_cast<int16_t>(6), count);
    Muls(nan, factor, 0.0f, blocks);
    Muls(scale, factor, with_sign ? 1.0f : 0.5f, blocks);
    PipeBarrier<PIPE_V>();
    Add(magnitude, magnitude, none, count);
    Add(scale, scale, nan, blocks);
    PipeBarrier<PIPE_V>();
    if (with_sign) {
      Or(magnitude.ReinterpretCast<uint16_t>(), magnitude.ReinterpretCast<uint16_t>(), code.ReinterpretCast<uint16_t>(),
         count);
    }
    Spread(0, 1, blocks);
    PipeBarrier<PIPE_V>();
    Cast(place.ReinterpretCast<float>(), magnitude.ReinterpretCast<half>(), RoundMode::CAST_NONE, count);
    PipeBarrier<PIPE_V>();
    Mul(place.ReinterpretCast<float>(), place.ReinterpretCast<float>(), OfBlock(0).ReinterpretCast<float>(), kWhole,
        Repeats(blocks), ByBlock());
  }

  // And back: with a sign to nearest, ties away from zero,
  __aicore__ inline void RoundSigned(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                     const LocalTensor<float>& t, const LocalTensor<float>& rest, int32_t count) {
    ScaleSigned(place, t, count);
    Adds(rest.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kHalfCode, count);
    PipeBarrier<PIPE_V>();
    Cast(t.ReinterpretCast<bfloat16_t>(), rest, RoundMode::CAST_TRUNC, count);
    PipeBarrier<PIPE_V>();
    And16(rest.ReinterpretCast<int16_t>(), t.ReinterpretCast<int16_t>(), 1, count);
    PipeBarrier<PIPE_V>();
    EncodeSigned(place, exponents, t, rest, rest.ReinterpretCast<int16_t>(),
                 static_cast<int16_t>(kAbove - (kHalfCode >> 16)), count);
  }

  // without one alike,
  __aicore__ inline void RoundAway(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                   const LocalTensor<float>& t, const LocalTensor<float>& rest, int32_t count) {
    Scale(place, t, count);
    Adds(rest.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kHalfCode, count);
    Encode(place, exponents, t, rest, count);
  }

  // or stochastically, by the draws of its elements that are in `rest`.
  __aicore__ inline void RoundByChance(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                       const LocalTensor<float>& t, const LocalTensor<float>& rest, bool with_sign,
                                       int32_t count) {
    const LocalTensor<int32_t> bits = rest.ReinterpretCast<int32_t>();
    ShiftLeft(bits, bits, kDropped - 16, count);
    if (!with_sign) {
      Scale(place, t, count);
      Add(bits, t.ReinterpretCast<int32_t>(), bits, count);
      Encode(place, exponents, t, rest, count);
      return;
    }
    const LocalTensor<int16_t> drawn = t.ReinterpretCast<int16_t>(), own = place.ReinterpretCast<int16_t>();
    ScaleSigned(place, t, count);
    Cast(place.ReinterpretCast<bfloat16_t>(), t, RoundMode::CAST_TRUNC, count);
    Add(bits, t.ReinterpretCast<int32_t>(), bits, count);
    PipeBarrier<PIPE_V>();
    Cast(drawn.ReinterpretCast<bfloat16_t>(), rest, RoundMode::CAST_TRUNC, count);
    And16(own, own, 1, count);
    PipeBarrier<PIPE_V>();
    And16(rest.ReinterpretCast<int16_t>(), drawn, 1, count);
    PipeBarrier<PIPE_V>();
    EncodeSigned(place, exponents, t, rest, own, static_cast<int16_t>(kAbove), count);
  }

 private:
  static constexpr int32_t kLanes = 3;        // arrays of a lane for each block
  static constexpr int32_t kSpreads = 2;      // what is spread of them
  static constexpr int32_t kSpreadLanes = 8;  // that one repeat of Brcb spreads
  static constexpr uint64_t kWhole = kRepeat;
  static constexpr uint16_t kEight = 8;
  static constexpr int32_t kHalfCode = 1 << (kDropped - 1);
  // An element's upper bits with so many more are 2^14, or more, where it is at least 2^-8 of its block's exponent.
  static constexpr int32_t kAbove = (1 << 14) - ((kScaled - 8) << 7);

  __aicore__ inline int32_t Blocks(int32_t count) { return (count + kCodeBlock - 1) / kCodeBlock; }
  __aicore__ inline uint8_t Repeats(int32_t blocks) { return static_cast<uint8_t>(blocks); }
  // The second source is one datablock for a repeat, the next one for the next.
  __aicore__ inline BinaryRepeatParams ByBlock() { return BinaryRepeatParams(1, 1, 0, 8, 8, 1); }

  __aicore__ inline LocalTensor<int32_t> Lane(int32_t i) { return lanes_.Get<int32_t>()[i * stride_]; }
  __aicore__ inline LocalTensor<uint16_t> Mask(int32_t i) { return masks_.Get<uint16_t>()[i * kBlockBytes / 2]; }
  __aicore__ inline LocalTensor<int32_t> OfBlock(int32_t i) {
    return spread_.Get<int32_t>()[i * stride_ * kSpreadLanes];
  }
  __aicore__ inline void Spread(int32_t to, int32_t from, int32_t blocks) {
    const int32_t repeats = RoundUp(blocks, kSpreadLanes) / kSpreadLanes;
    Brcb(OfBlock(to), Lane(from), static_cast<uint8_t>(repeats), BrcbRepeatParams(1, 8));
  }

  __aicore__ inline void And16(const LocalTensor<int16_t>& to, const LocalTensor<int16_t>& from, int32_t mask,
                               int32_t count) {
    And(to.ReinterpretCast<uint16_t>(), from.ReinterpretCast<uint16_t>(), Mask(mask), 2 * kWhole,
        static_cast<uint8_t>(RoundUp(count, 2 * kRepeat) / (2 * kRepeat)), BinaryRepeatParams(1, 1, 0, 8, 8, 0));
  }

  // t = |x|, the largest finite number where it is not finite. Of each block: its exponent in lane 0, the power of two
  // that makes it kScaled spread to OfBlock(0), and 1, or 0 for a block that is lost, to OfBlock(1).
  __aicore__ inline void Measure(const LocalTensor<float>& x, const LocalTensor<float>& t, int32_t count) {
    const int32_t blocks = Blocks(count);
    if (count % kCodeBlock != 0) {
      Duplicate(t[count / kCodeBlock * kCodeBlock], 0.0f, kCodeBlock);
      PipeBarrier<PIPE_V>();
    }
    Abs(t, x, count);
    PipeBarrier<PIPE_V>();
    Mins(t.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), kInfinity - 1, count);
    PipeBarrier<PIPE_V>();
    WholeReduceMax(Lane(0).ReinterpretCast<float>(), t, kRepeat, blocks, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Adds(Lane(0), Lane(0), (1 << kDropped) - 1, blocks);
    PipeBarrier<PIPE_V>();
    ShiftRight(Lane(0), Lane(0), 23, blocks);
    PipeBarrier<PIPE_V>();
    Maxs(Lane(0), Lane(0), kLeastExponent, blocks);
    PipeBarrier<PIPE_V>();
    Muls(Lane(1), Lane(0), -(1 << 23), blocks);
    PipeBarrier<PIPE_V>();
    Adds(Lane(1), Lane(1), kInfinity, blocks);
    PipeBarrier<PIPE_V>();
    Mins(Lane(2), Lane(1), 1, blocks);
    Spread(0, 1, blocks);
    PipeBarrier<PIPE_V>();
    Spread(1, 2, blocks);
    PipeBarrier<PIPE_V>();
  }

  // Of what has no sign: t = |x| scaled, place = 1 where it is no zero and not lost.
  __aicore__ inline void Scale(const LocalTensor<uint8_t>& place, const LocalTensor<float>& t, int32_t count) {
    const uint8_t repeats = Repeats(Blocks(count));
    Measure(place.ReinterpretCast<float>(), t, count);
    Min(place.ReinterpretCast<int32_t>(), t.ReinterpretCast<int32_t>(), OfBlock(1), kWhole, repeats, ByBlock());
    PipeBarrier<PIPE_V>();
    Mul(t, t, OfBlock(0).ReinterpretCast<float>(), kWhole, repeats, ByBlock());
    PipeBarrier<PIPE_V>();
  }

  // Of what has a sign: t = x scaled, zero where its block is lost.
  __aicore__ inline void ScaleSigned(const LocalTensor<uint8_t>& place, const LocalTensor<float>& t, int32_t count) {
    const LocalTensor<int32_t> pattern = t.ReinterpretCast<int32_t>();
    const uint8_t repeats = Repeats(Blocks(count));
    Measure(place.ReinterpretCast<float>(), t, count);
    Mul(t, place.ReinterpretCast<float>(), OfBlock(0).ReinterpretCast<float>(), kWhole, repeats, ByBlock());
    PipeBarrier<PIPE_V>();
    Mul(pattern, pattern, OfBlock(1), kWhole, repeats, ByBlock());
    PipeBarrier<PIPE_V>();
  }

  // t: the upper halves of ScaleSigned's patterns and what was added to them below a code's last bit; rest: those
  // without their signs. magnitude and above say which elements are no zero: kAbove.
  __aicore__ inline void EncodeSigned(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                      const LocalTensor<float>& t, const LocalTensor<float>& rest,
                                      const LocalTensor<int16_t>& magnitude, int16_t above, int32_t count) {
    const LocalTensor<int16_t> sign = t.ReinterpretCast<int16_t>(), some = sign[tile_];
    const LocalTensor<int16_t> code = rest.ReinterpretCast<int16_t>();
    const LocalTensor<uint16_t> sign_bits = sign.ReinterpretCast<uint16_t>();
    Adds(some, magnitude, above, count);
    ShiftRight(sign_bits, sign_bits, static_cast<uint16_t>(15), count);
    PipeBarrier<PIPE_V>();
    ShiftRight(some, some, static_cast<int16_t>(14), count);
    ShiftRight(code, code, static_cast<int16_t>(kDropped - 16), count);
    ShiftLeft(sign_bits, sign_bits, static_cast<uint16_t>(7), count);
    PipeBarrier<PIPE_V>();
    Adds(code, code, static_cast<int16_t>(-16 * (kScaled - 7)), count);
    PipeBarrier<PIPE_V>();
    Max(code, code, some, count);
    PipeBarrier<PIPE_V>();
    Add(code, code, sign, count);
    PipeBarrier<PIPE_V>();
    ToBytes(place, exponents, code, t.ReinterpretCast<half>(), count);
  }

  // rest: Scale's patterns and what was added to them below a code's last bit.
  __aicore__ inline void Encode(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                const LocalTensor<float>& t, const LocalTensor<float>& rest, int32_t count) {
    const LocalTensor<int16_t> code = t.ReinterpretCast<int16_t>(), some = rest.ReinterpretCast<int16_t>();
    PipeBarrier<PIPE_V>();
    Cast(t.ReinterpretCast<bfloat16_t>(), rest, RoundMode::CAST_TRUNC, count);
    PipeBarrier<PIPE_V>();
    ShiftRight(code, code, static_cast<int16_t>(kDropped - 16), count);
    Cast(some, place.ReinterpretCast<int32_t>(), RoundMode::CAST_NONE, count);
    PipeBarrier<PIPE_V>();
    Adds(code, code, static_cast<int16_t>(-16 * (kScaled - 15)), count);
    PipeBarrier<PIPE_V>();
    Max(code, code, some, count);
    PipeBarrier<PIPE_V>();
    ToBytes(place, exponents, code, rest.ReinterpretCast<half>(), count);
  }

  // Codes, and the exponents in lane 0, by way of f16, which alone can be cast to bytes.
  __aicore__ inline void ToBytes(const LocalTensor<uint8_t>& place, const LocalTensor<uint8_t>& exponents,
                                 const LocalTensor<int16_t>& code, const LocalTensor<half>& room, int32_t count) {
    const int32_t blocks = Blocks(count);
    const LocalTensor<half> exponent = Lane(2).ReinterpretCast<half>();
    Cast(room, code, RoundMode::CAST_RINT, count);
    Cast(Lane(1).ReinterpretCast<float>(), Lane(0), RoundMode::CAST_RINT, blocks);
    PipeBarrier<PIPE_V>();
    Cast(exponent, Lane(1).ReinterpretCast<float>(), RoundMode::CAST_RINT, blocks);
    Cast(place, room, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Cast(exponents, exponent, RoundMode::CAST_RINT, blocks);
  }

  TBuf<TPosition::VECCALC> lanes_, spread_, masks_;
  int32_t tile_, stride_;
};

}  // namespace npu
}  // namespace npuzero
