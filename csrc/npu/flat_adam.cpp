// The contract is in ops/flat_adam.h.
#include "npu/flat.h"

namespace npuzero {
namespace npu {

class Adam {
 public:
  using Group = AdamGroup;

  static __aicore__ inline int32_t Used(__gm__ const AdamGroup* group) { return group->amsgrad != 0 ? 3 : 2; }
  static __aicore__ inline bool Signed(int32_t i) { return i == 0; }
  static __aicore__ inline bool ByChance(int32_t i) { return i == 1; }

  __aicore__ inline void Init(TPipe& pipe, int32_t tile) {
    pipe.InitBuffer(divisor_, kBlockBytes);
    pipe.InitBuffer(larger_, tile / 8);
  }

  __aicore__ inline void Take(__gm__ const AdamGroup* group, uint64_t dynamic) {
    beta1_ = group->beta1;
    one_minus_beta1_ = group->one_minus_beta1;
    beta2_ = group->beta2;
    one_minus_beta2_ = group->one_minus_beta2;
    eps_ = group->eps;
    weight_decay_ = group->weight_decay;
    l2_ = group->l2 != 0;
    amsgrad_ = group->amsgrad != 0;
    const bool given = group->row >= 0;
    const uint64_t row = dynamic + static_cast<int64_t>(group->row) * kAdamColumns * 4;
    step_size_ = given ? ScalarAt(row, 0.0f) : group->step_size;
    decay_ = given ? ScalarAt(row + 8, 0.0f) : group->decay;
    step = given ? static_cast<uint32_t>(ScalarAt(row + 12, 0.0f)) : group->step;
    Duplicate(divisor_.Get<float>(), given ? ScalarAt(row + 4, 0.0f) : group->bias2_sqrt, kBlockBytes / 4);
  }

  __aicore__ inline void Apply(const FlatTile& tile, int32_t count) {
    const LocalTensor<float> p = tile.p, g = tile.g, m = tile.moments[0], v = tile.moments[1], t = tile.t;
    if (l2_) {
      PipeBarrier<PIPE_V>();
      Muls(t, p, weight_decay_, count);
      PipeBarrier<PIPE_V>();
      Add(g, g, t, count);
    }
    PipeBarrier<PIPE_V>();
    Muls(p, p, decay_, count);
    Muls(m, m, beta1_, count);
    Muls(v, v, beta2_, count);
    Muls(t, g, one_minus_beta1_, count);
    PipeBarrier<PIPE_V>();
    Add(m, m, t, count);
    PipeBarrier<PIPE_V>();
    Muls(t, g, one_minus_beta2_, count);
    PipeBarrier<PIPE_V>();
    Mul(t, t, g, count);
    PipeBarrier<PIPE_V>();
    Add(v, v, t, count);
    PipeBarrier<PIPE_V>();
    Muls(g, m, step_size_, count);
    if (amsgrad_) {
      const LocalTensor<float> top = tile.moments[2];
      TakeLarger(top, v, tile.mask, count);
      Sqrt(t, top, count);
    } else {
      Sqrt(t, v, count);
    }
    PipeBarrier<PIPE_V>();
    const uint8_t repeats = static_cast<uint8_t>(RoundUp(count, kRepeat) / kRepeat);
    Div(t, t, divisor_.Get<float>(), static_cast<uint64_t>(kRepeat), repeats, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
    PipeBarrier<PIPE_V>();
    Adds(t, t, eps_, count);
    PipeBarrier<PIPE_V>();
    Div(g, g, t, count);
    PipeBarrier<PIPE_V>();
    Sub(p, p, g, count);
  }

  uint32_t step;

 private:
  // top = max(top, v), NaN if either is: Max does not say what it does with one.
  __aicore__ inline void TakeLarger(const LocalTensor<float>& top, const LocalTensor<float>& v,
                                    const LocalTensor<uint8_t>& number, int32_t count) {
    const LocalTensor<uint8_t> larger = larger_.Get<uint8_t>();
    const int32_t lanes = RoundUp(count, kRepeat);
    Compare(larger, top, v, CMPMODE::GT, lanes);
    Compare(number, top, top, CMPMODE::NE, lanes);
    PipeBarrier<PIPE_V>();
    Or(larger.ReinterpretCast<uint16_t>(), larger.ReinterpretCast<uint16_t>(), number.ReinterpretCast<uint16_t>(),
       lanes / 16);
    PipeBarrier<PIPE_V>();
    Select(top, larger, top, v, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
    PipeBarrier<PIPE_V>();
  }

  TBuf<TPosition::VECCALC> divisor_, larger_;
  float beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, eps_, weight_decay_, decay_, step_size_;
  bool l2_, amsgrad_;
};

__aicore__ inline void RunFlatAdam(GM_ADDR table) { RunFlat<Adam>(table); }

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_flat_adam, RunFlatAdam)
