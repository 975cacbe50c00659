// The contract is in ops/pack.h. Loads and stores run beside the arithmetic: two buffers each way.
#include "npu/walk.h"

namespace npuzero {
namespace npu {

class Pack {
 public:
  __aicore__ inline explicit Pack(GM_ADDR table) : tiles_(table) {
    __gm__ const PackHead* head = reinterpret_cast<__gm__ const PackHead*>(table);
    scaled_ = head->scaled != 0;
    accumulate_ = head->accumulate != 0;
    scale_ = head->scale_at == 0 ? head->factor : head->factor * ScalarAt(head->scale_at, 1.0f);
    pipe_.InitBuffer(in_, 2, 2 * kSlotBytes);
    pipe_.InitBuffer(out_, 2, kSlotBytes);
    pipe_.InitBuffer(wide_, 2 * kSlotBytes);
    pipe_.InitBuffer(sum_, 2 * kSlotBytes);
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
      Compute(row, count);
      LocalTensor<uint8_t> out = out_.DeQue<uint8_t>();
      const int32_t size = ItemSize(row->target_dtype);
      npu::Store(row->target + at * size, out, count * size);
      out_.FreeTensor(out);
    }
  }

 private:
  __aicore__ inline void LoadTile() {
    LocalTensor<uint8_t> in = in_.AllocTensor<uint8_t>();
    const int32_t source = ItemSize(tiles_.row->source_dtype), target = ItemSize(tiles_.row->target_dtype);
    npu::Load(in, tiles_.row->source + tiles_.at * source, tiles_.count * source);
    if (accumulate_) npu::Load(in[kSlotBytes], tiles_.row->target + tiles_.at * target, tiles_.count * target);
    in_.EnQue(in);
  }

  __aicore__ inline void Compute(__gm__ const PackRow* row, int32_t count) {
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    LocalTensor<uint8_t> out = out_.AllocTensor<uint8_t>();
    PipeBarrier<PIPE_V>();  // the last tile may still read what lies between
    if (scaled_ || accumulate_) {
      Scale(out, in, row->source_dtype, row->target_dtype, count);
    } else {
      npu::Convert(out, row->target_dtype, in, row->source_dtype, wide_.Get<float>(), count);
    }
    out_.EnQue(out);
    in_.FreeTensor(in);
  }

  __aicore__ inline void Scale(const LocalTensor<uint8_t>& out, const LocalTensor<uint8_t>& in, int32_t source,
                               int32_t target, int32_t count) {
    LocalTensor<float> x = source == kF32 ? in.ReinterpretCast<float>() : wide_.Get<float>();
    LocalTensor<float> result = target == kF32 ? out.ReinterpretCast<float>() : wide_.Get<float>();
    if (source != kF32) {
      npu::Widen(x, in, source, count);
      PipeBarrier<PIPE_V>();
    }
    Muls(result, x, scale_, count);
    PipeBarrier<PIPE_V>();
    if (accumulate_) {
      LocalTensor<float> sum = in[kSlotBytes].ReinterpretCast<float>();
      if (target != kF32) {
        sum = sum_.Get<float>();
        npu::Widen(sum, in[kSlotBytes], target, count);
        PipeBarrier<PIPE_V>();
      }
      Add(result, sum, result, count);
      PipeBarrier<PIPE_V>();
    }
    if (target != kF32) npu::Round(out, result, target, count);
  }

  Tiles<PackHead, PackRow> tiles_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> wide_, sum_;
  float scale_;
  bool scaled_, accumulate_;
};

__aicore__ inline void RunPack(GM_ADDR table) {
  Pack pack(table);
  pack.Run();
}

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_pack, RunPack)
