// The contract is in ops/dequantize_sum.h. Loads and stores run beside the arithmetic: two buffers each way, of which
// those that are loaded have a tile of one row.
#include "npu/wire.h"

namespace npuzero {
namespace npu {

class DequantizeSum {
 public:
  __aicore__ inline explicit DequantizeSum(GM_ADDR table) : tiles_(table) {
    __gm__ const DequantizeHead* head = reinterpret_cast<__gm__ const DequantizeHead*>(table);
    const int32_t tile = head->wire.tile;
    dtype_ = head->wire.dtype;
    rows_ = head->rows;
    row_bytes_ = head->row_bytes;
    accumulate_ = head->accumulate != 0;
    scales_ = tile * head->wire.bits / 8;
    pipe_.InitBuffer(in_, 2, scales_ + 2 * kSkew);
    pipe_.InitBuffer(out_, 2, tile * ItemSize(dtype_));
    pipe_.InitBuffer(wide_, 4 * tile + 2 * kSkew);
    pipe_.InitBuffer(codes_, 2 * tile);
    if (dtype_ != kF32) pipe_.InitBuffer(sum_, 4 * tile);
    if (accumulate_) pipe_.InitBuffer(before_, 1, tile * ItemSize(dtype_) + 2 * kSkew);
    blocks_.Init(pipe_, head->wire, 1, 1);
  }

  __aicore__ inline void Run() {
    bool more = tiles_.Next();
    if (more) LoadRow(0);
    while (more) {
      const uint64_t target = tiles_.row->values + tiles_.at * ItemSize(dtype_);
      const int32_t count = tiles_.count, bytes = count * ItemSize(dtype_);
      if (accumulate_) LoadBefore(target, bytes);
      LocalTensor<uint8_t> out = out_.AllocTensor<uint8_t>();
      const LocalTensor<float> sum = dtype_ == kF32 ? out.ReinterpretCast<float>() : sum_.Get<float>();
      for (int32_t row = 0; row < rows_; ++row) {
        const bool last = row == rows_ - 1;
        if (last) more = tiles_.Next();
        if (more) LoadRow(last ? 0 : row + 1);
        AddRow(sum, row == 0, count);
      }
      Finish(out, sum, count);
      out_.EnQue(out);
      LocalTensor<uint8_t> done = out_.DeQue<uint8_t>();
      npu::Store(target, done, bytes);
      out_.FreeTensor(done);
    }
  }

 private:
  // Of the tile that is next.
  __aicore__ inline void LoadRow(int32_t row) {
    LocalTensor<uint8_t> in = in_.AllocTensor<uint8_t>();
    const int64_t before = row * row_bytes_;
    npu::Load(in, tiles_.row->codes + before + blocks_.CodeBytes(tiles_.at), blocks_.CodeBytes(tiles_.count));
    npu::Load(in[scales_], tiles_.row->scales + before + blocks_.ScaleBytes(tiles_.at),
              blocks_.ScaleBytes(tiles_.count));
    in_.EnQue(in);
  }

  // What the sum is added to; out of step with it.
  __aicore__ inline void LoadBefore(uint64_t target, int32_t bytes) {
    LocalTensor<uint8_t> before = before_.AllocTensor<uint8_t>();
    npu::Load(before[kSkew], target, bytes);
    before_.EnQue(before);
  }

  __aicore__ inline void AddRow(const LocalTensor<float>& sum, bool first, int32_t count) {
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    const LocalTensor<half> codes = codes_.Get<half>();
    const int32_t blocks = blocks_.Blocks(count);
    blocks_.Widen(codes, in, count);
    npu::Widen(blocks_.LaneOfFloats(0), in[scales_], kBF16, blocks);
    PipeBarrier<PIPE_V>();
    Cast(Wide(), codes, RoundMode::CAST_NONE, count);
    blocks_.Spread(0, 0, blocks);
    PipeBarrier<PIPE_V>();
    blocks_.MulByBlock(first ? sum : Wide(), Wide(), 0, count);
    if (!first) {
      PipeBarrier<PIPE_V>();
      Add(sum, sum, Wide(), count);
    }
    in_.FreeTensor(in);
  }

  __aicore__ inline void Finish(const LocalTensor<uint8_t>& out, const LocalTensor<float>& sum, int32_t count) {
    PipeBarrier<PIPE_V>();
    if (accumulate_) {
      LocalTensor<uint8_t> in = before_.DeQue<uint8_t>();
      LocalTensor<float> before = in[kSkew].ReinterpretCast<float>();
      if (dtype_ != kF32) {
        before = Wide();
        npu::Widen(before, in[kSkew], dtype_, count);
        PipeBarrier<PIPE_V>();
      }
      Add(sum, before, sum, count);
      PipeBarrier<PIPE_V>();
      before_.FreeTensor(in);
    }
    if (dtype_ != kF32) npu::Round(out, sum, dtype_, count);
  }

  __aicore__ inline LocalTensor<float> Wide() { return wide_.Get<float>()[kSkew / 4]; }  // out of step with the sum

  Tiles<DequantizeHead, WireRow> tiles_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECIN, 1> before_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> wide_, codes_, sum_;
  WireBlocks blocks_;
  int32_t dtype_, rows_, scales_;
  int64_t row_bytes_;
  bool accumulate_;
};

__aicore__ inline void RunDequantizeSum(GM_ADDR table) {
  DequantizeSum sum(table);
  sum.Run();
}

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_dequantize_sum, RunDequantizeSum)
