// The contract is in ops/flat_lion.h.
#include "npu/flat.h"

namespace npuzero {
namespace npu {

class Lion {
 public:
  using Group = LionGroup;

  static __aicore__ inline int32_t Used(__gm__ const LionGroup*) { return 1; }
  static __aicore__ inline bool Signed(int32_t) { return true; }
  static __aicore__ inline bool ByChance(int32_t) { return true; }

  __aicore__ inline void Init(TPipe& pipe, int32_t tile) { pipe.InitBuffer(first_, tile / 8); }

  __aicore__ inline void Take(__gm__ const LionGroup* group, uint64_t dynamic) {
    beta1_ = group->beta1;
    one_minus_beta1_ = group->one_minus_beta1;
    beta2_ = group->beta2;
    one_minus_beta2_ = group->one_minus_beta2;
    const bool given = group->row >= 0;
    const uint64_t row = dynamic + static_cast<int64_t>(group->row) * kLionColumns * 4;
    step_size_ = given ? ScalarAt(row, 0.0f) : group->step_size;
    decay_ = given ? ScalarAt(row + 4, 0.0f) : group->decay;
    step = given ? static_cast<uint32_t>(ScalarAt(row + 8, 0.0f)) : group->step;
  }

  __aicore__ inline void Apply(const FlatTile& tile, int32_t count) {
    const LocalTensor<float> p = tile.p, g = tile.g, m = tile.moments[0], c = tile.t, rest = tile.rest;
    PipeBarrier<PIPE_V>();
    Muls(p, p, decay_, count);
    Muls(c, m, beta1_, count);
    Muls(rest, g, one_minus_beta1_, count);
    PipeBarrier<PIPE_V>();
    Add(c, c, rest, count);
    Muls(m, m, beta2_, count);
    PipeBarrier<PIPE_V>();
    TakeSign(rest, c, tile.mask, count);
    PipeBarrier<PIPE_V>();
    Muls(c, g, one_minus_beta2_, count);
    Muls(rest, rest, step_size_, count);
    PipeBarrier<PIPE_V>();
    Add(m, m, c, count);  // before the last barrier: the next tile uses c at once
    PipeBarrier<PIPE_V>();
    Sub(p, p, rest, count);
  }

  uint32_t step;

 private:
  // 1 above zero, -1 below, else c: no comparison with NaN is true, so what is no number is chosen last.
  __aicore__ inline void TakeSign(const LocalTensor<float>& sign, const LocalTensor<float>& c,
                                  const LocalTensor<uint8_t>& second, int32_t count) {
    const LocalTensor<uint8_t> first = first_.Get<uint8_t>();
    const int32_t lanes = RoundUp(count, kRepeat);
    CompareScalar(first, c, 0.0f, CMPMODE::LE, lanes);
    CompareScalar(second, c, 0.0f, CMPMODE::GE, lanes);
    PipeBarrier<PIPE_V>();
    Select(sign, first, c, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    PipeBarrier<PIPE_V>();
    Select(sign, second, sign, -1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    Compare(first, c, c, CMPMODE::EQ, lanes);
    PipeBarrier<PIPE_V>();
    Select(sign, first, sign, c, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
  }

  TBuf<TPosition::VECCALC> first_;
  float beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, decay_, step_size_;
};

__aicore__ inline void RunFlatLion(GM_ADDR table) { RunFlat<Lion>(table); }

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_flat_lion, RunFlatLion)
