// What quantize and dequantize_sum have in common: codes of 8 or 4 bits, and what follows from a block's scale. That is
// computed in a lane for each block, spread to a datablock for each (Brcb), and read there by the block's repeats: two
// or four of f32, so every second or fourth repeat of a tile is one instruction.
//
// A2 has no Cast from f32 to 8 bits: whole numbers go by way of 16, where all casts are exact.
#pragma once

#include "npu/walk.h"

namespace npuzero {
namespace npu {

class WireBlocks {
 public:
  // So many arrays of lanes, and of what is spread of them, for tiles as the head says.
  __aicore__ inline void Init(TPipe& pipe, __gm__ const Wire& wire, int32_t lanes, int32_t spreads) {
    bits_ = wire.bits;
    block_ = wire.block;
    most_ = RoundUp(wire.tile / block_, kSpreadLanes);
    pipe.InitBuffer(lanes_, lanes * most_ * 4);
    pipe.InitBuffer(spread_, spreads * most_ * kBlockBytes);
  }

  __aicore__ inline int32_t Blocks(int32_t count) { return count / block_; }
  __aicore__ inline int64_t CodeBytes(int64_t count) { return count * bits_ / 8; }
  __aicore__ inline int64_t ScaleBytes(int64_t count) { return count / block_ * 2; }

  __aicore__ inline LocalTensor<int32_t> Lane(int32_t i) { return lanes_.Get<int32_t>()[i * most_]; }
  __aicore__ inline LocalTensor<float> LaneOfFloats(int32_t i) { return Lane(i).ReinterpretCast<float>(); }

  __aicore__ inline void Spread(int32_t to, int32_t from, int32_t blocks) {
    const int32_t repeats = RoundUp(blocks, kSpreadLanes) / kSpreadLanes;
    Brcb(OfBlock(to), Lane(from), static_cast<uint8_t>(repeats), BrcbRepeatParams(1, 8));
  }

  // to = from * what was spread; `to` may be `from`.
  __aicore__ inline void MulByBlock(const LocalTensor<float>& to, const LocalTensor<float>& from, int32_t spread,
                                    int32_t count) {
    for (int32_t i = 0; i < block_; i += kRepeat) {
      Mul(to[i], from[i], OfBlock(spread).ReinterpretCast<float>(), static_cast<uint64_t>(kRepeat), Repeats(count),
          ByBlock());
    }
  }

  // The bits of x that what was spread has, too.
  __aicore__ inline void Mask(const LocalTensor<float>& x, int32_t spread, int32_t count) {
    const LocalTensor<uint16_t> halves = x.ReinterpretCast<uint16_t>();
    for (int32_t i = 0; i < 2 * block_; i += 2 * kRepeat) {
      And(halves[i], halves[i], OfBlock(spread).ReinterpretCast<uint16_t>(), static_cast<uint64_t>(2 * kRepeat),
          Repeats(count), ByBlock());
    }
  }

  // Of every block, one repeat of the largest of what its repeats have in a place: of patterns, which are ordered as
  // magnitudes are, NaN above infinity. folded has kSkew bytes more than half as many elements.
  __aicore__ inline void Fold(const LocalTensor<int32_t>& folded, const LocalTensor<int32_t>& patterns, int32_t count) {
    const BinaryRepeatParams apart(1, 1, 1, 8, Step(), Step());
    const int32_t whole = Blocks(count) * kRepeat, beside = most_ * kRepeat + kSkew / 4;
    for (int32_t i = 0; 2 * i < block_; i += kRepeat) {
      Max(folded[i / kRepeat * beside], patterns[2 * i], patterns[2 * i + kRepeat], static_cast<uint64_t>(kRepeat),
          Repeats(count), apart);
    }
    PipeBarrier<PIPE_V>();
    if (block_ > 2 * kRepeat) {
      Max(folded, folded, folded[beside], whole);
      PipeBarrier<PIPE_V>();
    }
  }

  // Codes, as whole numbers of f16, to what a message has, and back.
  __aicore__ inline void Narrow(const LocalTensor<uint8_t>& to, const LocalTensor<half>& from, int32_t count) {
    if (bits_ == 8) {
      Cast(to.ReinterpretCast<int8_t>(), from, RoundMode::CAST_RINT, count);
    } else {
      Cast(to.ReinterpretCast<int4b_t>(), from, RoundMode::CAST_RINT, count);
    }
  }
  __aicore__ inline void Widen(const LocalTensor<half>& to, const LocalTensor<uint8_t>& from, int32_t count) {
    if (bits_ == 8) {
      Cast(to, from.ReinterpretCast<int8_t>(), RoundMode::CAST_NONE, count);
    } else {
      Cast(to, from.ReinterpretCast<int4b_t>(), RoundMode::CAST_NONE, count);
    }
  }

 private:
  static constexpr int32_t kSpreadLanes = 8;  // that one repeat of Brcb spreads

  // From a repeat of one block to the same of the next, in datablocks.
  __aicore__ inline uint8_t Step() { return static_cast<uint8_t>(block_ * 4 / kBlockBytes); }
  __aicore__ inline uint8_t Repeats(int32_t count) { return static_cast<uint8_t>(Blocks(count)); }
  __aicore__ inline BinaryRepeatParams ByBlock() { return BinaryRepeatParams(1, 1, 0, Step(), Step(), 1); }
  __aicore__ inline LocalTensor<int32_t> OfBlock(int32_t i) { return spread_.Get<int32_t>()[i * most_ * kSpreadLanes]; }

  TBuf<TPosition::VECCALC> lanes_, spread_;
  int32_t bits_, block_, most_;
};

}  // namespace npu
}  // namespace npuzero
