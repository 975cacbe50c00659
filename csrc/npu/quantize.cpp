// The contract is in ops/quantize.h. Loads and stores run beside the arithmetic: two buffers each way.
#include "npu/wire.h"

namespace npuzero {
namespace npu {

constexpr int32_t kLeastScale = 7 << 23;  // the pattern of 2^-120
constexpr int32_t kNan = 0x7fc0;          // a scale's

class Quantize {
 public:
  __aicore__ inline explicit Quantize(GM_ADDR table) : tiles_(table) {
    __gm__ const QuantizeHead* head = reinterpret_cast<__gm__ const QuantizeHead*>(table);
    const int32_t tile = head->wire.tile;
    dtype_ = head->wire.dtype;
    inverse_ = head->inverse;
    residual_ = head->residual != 0;
    // Of what is loaded: the source, and out of step with it the residual. Of what is stored: codes, scales, residual.
    beside_ = tile * ItemSize(dtype_) + kSkew;
    scales_ = tile * head->wire.bits / 8;
    rest_ = scales_ + 2 * kSkew;
    pipe_.InitBuffer(in_, 2, residual_ ? beside_ + kSkew + 4 * tile : tile * ItemSize(dtype_));
    pipe_.InitBuffer(out_, 2, residual_ ? rest_ + 4 * tile : rest_);
    pipe_.InitBuffer(wide_, 4 * tile);
    pipe_.InitBuffer(work_, 4 * tile + 2 * kSkew);
    pipe_.InitBuffer(short_, 2 * tile + 2 * kSkew);
    blocks_.Init(pipe_, head->wire, kLanes, kSpreads);
    Duplicate(blocks_.LaneOfFloats(kOnes), 1.0f, blocks_.Blocks(tile));
  }

  __aicore__ inline void Run() {
    bool more = tiles_.Next();
    if (more) LoadTile();
    while (more) {
      __gm__ const WireRow* row = tiles_.row;
      const int64_t at = tiles_.at;
      const int32_t count = tiles_.count;
      more = tiles_.Next();
      if (more) LoadTile();
      Compute(count);
      LocalTensor<uint8_t> out = out_.DeQue<uint8_t>();
      npu::Store(row->codes + blocks_.CodeBytes(at), out, blocks_.CodeBytes(count));
      npu::Store(row->scales + blocks_.ScaleBytes(at), out[scales_], blocks_.ScaleBytes(count));
      if (residual_) npu::Store(row->residual + at * 4, out[rest_], count * 4);
      out_.FreeTensor(out);
    }
  }

 private:
  // Lanes of blocks, and what is spread of them.
  enum { kOnes, kMost, kLost, kKept, kScale, kFactor, kInverse, kLanes };
  enum { kMask, kInverses, kFactors, kSpreads };

  __aicore__ inline void LoadTile() {
    LocalTensor<uint8_t> in = in_.AllocTensor<uint8_t>();
    const int32_t size = ItemSize(dtype_);
    npu::Load(in, tiles_.row->values + tiles_.at * size, tiles_.count * size);
    if (residual_) npu::Load(in[beside_], tiles_.row->residual + tiles_.at * 4, tiles_.count * 4);
    in_.EnQue(in);
  }

  __aicore__ inline void Compute(int32_t count) {
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    LocalTensor<uint8_t> out = out_.AllocTensor<uint8_t>();
    const LocalTensor<float> x = dtype_ == kF32 ? in.ReinterpretCast<float>() : wide_.Get<float>();
    PipeBarrier<PIPE_V>();  // the last tile may still read what lies between
    if (dtype_ != kF32) {
      npu::Widen(x, in, dtype_, count);
      PipeBarrier<PIPE_V>();
    }
    if (residual_) {
      Add(x, x, in[beside_].ReinterpretCast<float>(), count);
      PipeBarrier<PIPE_V>();
    }
    Measure(x, count);
    FindScales(out[scales_].ReinterpretCast<int16_t>(), x, count);
    RoundCodes(out, x, count);
    out_.EnQue(out);
    in_.FreeTensor(in);
  }

  // The pattern of each block's largest magnitude: infinity's where anything is not finite.
  __aicore__ inline void Measure(const LocalTensor<float>& x, int32_t count) {
    const LocalTensor<int32_t> folded = short_.Get<int32_t>();
    const int32_t blocks = blocks_.Blocks(count);
    Abs(Work(), x, count);
    PipeBarrier<PIPE_V>();
    blocks_.Fold(folded, Work().ReinterpretCast<int32_t>(), count);
    Mins(folded, folded, kInfinity, blocks * kRepeat);
    PipeBarrier<PIPE_V>();
    WholeReduceMax(blocks_.LaneOfFloats(kMost), folded.ReinterpretCast<float>(), kRepeat, blocks, 1, 1, 8,
                   ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
  }

  // Scales; and spread for codes and residuals the same as floats, and their inverses. A block that is lost becomes
  // zeros, with a factor that is finite.
  __aicore__ inline void FindScales(const LocalTensor<int16_t>& scales, const LocalTensor<float>& x, int32_t count) {
    const LocalTensor<int32_t> largest = blocks_.Lane(kMost), lost = blocks_.Lane(kLost);
    const LocalTensor<int32_t> scale = blocks_.Lane(kScale), factor = blocks_.Lane(kFactor);
    const LocalTensor<float> product = blocks_.LaneOfFloats(kScale);
    const int32_t blocks = blocks_.Blocks(count);
    Mins(scale, largest, kInfinity - 1, blocks);
    Adds(lost, largest, 1 - kInfinity, blocks);
    PipeBarrier<PIPE_V>();
    Muls(product, product, inverse_, blocks);
    Maxs(lost, lost, 0, blocks);  // 1 or 0
    PipeBarrier<PIPE_V>();
    Maxs(scale, scale, kLeastScale, blocks);
    Adds(blocks_.Lane(kKept), lost, -1, blocks);
    PipeBarrier<PIPE_V>();
    Muls(lost, lost, kNan, blocks);
    Adds(scale, scale, 0xffff, blocks);
    blocks_.Spread(kMask, kKept, blocks);
    PipeBarrier<PIPE_V>();
    ShiftRight(scale, scale, 16, blocks);
    blocks_.Mask(x, kMask, count);
    PipeBarrier<PIPE_V>();
    ShiftLeft(factor, scale, 16, blocks);
    Max(lost, lost, scale, blocks);  // NaN's pattern is above every scale's
    PipeBarrier<PIPE_V>();
    Div(blocks_.LaneOfFloats(kInverse), blocks_.LaneOfFloats(kOnes), blocks_.LaneOfFloats(kFactor), blocks);
    Cast(scales, lost, RoundMode::CAST_NONE, blocks);
    PipeBarrier<PIPE_V>();
    blocks_.Spread(kInverses, kInverse, blocks);
    if (residual_) blocks_.Spread(kFactors, kFactor, blocks);
    PipeBarrier<PIPE_V>();
  }

  // Codes, and what is left of x.
  __aicore__ inline void RoundCodes(const LocalTensor<uint8_t>& out, const LocalTensor<float>& x, int32_t count) {
    const LocalTensor<int16_t> codes = short_.Get<int16_t>();
    const LocalTensor<half> whole = short_.Get<half>();
    blocks_.MulByBlock(Work(), x, kInverses, count);
    PipeBarrier<PIPE_V>();
    Cast(codes, Work(), RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    if (residual_) {
      Cast(Work(), codes, RoundMode::CAST_NONE, count);
      PipeBarrier<PIPE_V>();
      blocks_.MulByBlock(Work(), Work(), kFactors, count);
    }
    Cast(whole, codes, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    if (residual_) Sub(out[rest_].ReinterpretCast<float>(), x, Work(), count);
    blocks_.Narrow(out, whole, count);
  }

  __aicore__ inline LocalTensor<float> Work() { return work_.Get<float>()[kSkew / 4]; }  // out of step with x

  Tiles<QuantizeHead, WireRow> tiles_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> wide_, work_, short_;
  WireBlocks blocks_;
  int32_t dtype_, beside_, scales_, rest_;
  float inverse_;
  bool residual_;
};

__aicore__ inline void RunQuantize(GM_ADDR table) {
  Quantize quantize(table);
  quantize.Run();
}

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_quantize, RunQuantize)
