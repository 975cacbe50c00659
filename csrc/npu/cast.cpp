// The contract is in ops/cast.h.
#include "npu/draws.h"
#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kStochastic = 1;  // ops/cast.h's Rounding
constexpr int32_t kTf32 = 2;
constexpr int32_t kAway = 3;

class CastKernel {
 public:
  __aicore__ inline explicit CastKernel(GM_ADDR table) : tiles_(table) {
    __gm__ const CastHead* head = reinterpret_cast<__gm__ const CastHead*>(table);
    rounding_ = head->rounding;
    const uint64_t seed = head->seed_low | static_cast<uint64_t>(head->seed_high) << 32;
    offset_ = head->offset;
    pipe_.InitBuffer(in_, 2, kSlotBytes);
    pipe_.InitBuffer(mask_, kSlotBytes / 32 + kSkew);  // so that what follows is out of step with `in`
    pipe_.InitBuffer(out_, 2, kSlotBytes);
    pipe_.InitBuffer(wide_, 2 * kSlotBytes + kSkew);
    if (rounding_ == kStochastic) draws_.Init(pipe_, table, head->head.columns, seed);
  }

  __aicore__ inline void Run() {
    bool more = tiles_.Next();
    if (more) LoadTile();
    while (more) {
      __gm__ const PackRow* row = tiles_.row;
      const int64_t at = tiles_.at;
      const int32_t count = tiles_.count;
      more = tiles_.Next();
      if (more) LoadTile();
      Compute(row, at, count);
      LocalTensor<uint8_t> out = out_.DeQue<uint8_t>();
      const int32_t size = ItemSize(row->target_dtype);
      npu::Store(row->target + at * size, out, count * size);
      out_.FreeTensor(out);
    }
  }

 private:
  __aicore__ inline void LoadTile() {
    LocalTensor<uint8_t> in = in_.AllocTensor<uint8_t>();
    const int32_t size = ItemSize(tiles_.row->source_dtype);
    npu::Load(in, tiles_.row->source + tiles_.at * size, tiles_.count * size);
    in_.EnQue(in);
  }

  __aicore__ inline void Compute(__gm__ const PackRow* row, int64_t at, int32_t count) {
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    LocalTensor<uint8_t> out = out_.AllocTensor<uint8_t>();
    PipeBarrier<PIPE_V>();  // the last tile may still read what lies between
    if (rounding_ == kTf32) {
      RoundTf32(out.ReinterpretCast<float>(), in.ReinterpretCast<float>(), count);
    } else if (rounding_ == kStochastic) {
      const LocalTensor<int32_t> bits = wide_.Get<int32_t>(), room = bits[(kSlotBytes + kSkew) / 4];
      draws_.Make(bits, room, offset_ + static_cast<uint64_t>(at), 0, 0, count);
      draws_.Round(out, in.ReinterpretCast<float>(), bits, room.ReinterpretCast<float>(), mask_.Get<uint8_t>(), count);
    } else if (rounding_ == kAway) {
      npu::Round(out, in.ReinterpretCast<float>(), kBF16, count, RoundMode::CAST_ROUND);
    } else {
      npu::Convert(out, row->target_dtype, in, row->source_dtype, wide_.Get<float>(), count);
    }
    out_.EnQue(out);
    in_.FreeTensor(in);
  }

  // The pattern plus half of what is dropped, and that cleared; infinity and NaN as they are. The sum overflows for
  // some NaNs alone, where it is not chosen.
  __aicore__ inline void RoundTf32(const LocalTensor<float>& out, const LocalTensor<float>& in, int32_t count) {
    const LocalTensor<uint32_t> pattern = out.ReinterpretCast<uint32_t>();
    const LocalTensor<float> magnitude = wide_.Get<float>();
    const LocalTensor<uint8_t> finite = mask_.Get<uint8_t>();
    Adds(out.ReinterpretCast<int32_t>(), in.ReinterpretCast<int32_t>(), 0x1000, count);
    Abs(magnitude, in, count);
    PipeBarrier<PIPE_V>();
    ShiftRight(pattern, pattern, 13u, count);
    CompareScalar(finite, magnitude, kLargest, CMPMODE::LE, RoundUp(count, kRepeat));
    PipeBarrier<PIPE_V>();
    ShiftLeft(pattern, pattern, 13u, count);
    PipeBarrier<PIPE_V>();
    Select(out, finite, out, in, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
  }

  Tiles<CastHead, PackRow> tiles_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> wide_, mask_;
  Draws draws_;
  int32_t rounding_;
  uint64_t offset_;
};

__aicore__ inline void RunCast(GM_ADDR table) {
  CastKernel cast(table);
  cast.Run();
}

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_cast, RunCast)
