// The contract is in ops/flat_adam.h. A tile of master, moments and gradient lies in one of two slots, is updated where
// it lies, and is stored from there, while the other slot is loaded or stored; flags of our own order the three pipes,
// since queues would want every tile twice. One operation of the formula is one vector instruction.
#include "npu/codes.h"
#include "npu/draws.h"
#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kSlots = 2;

class FlatAdam {
 public:
  __aicore__ inline explicit FlatAdam(GM_ADDR table) : tiles_(table) {
    __gm__ const AdamHead* head = reinterpret_cast<__gm__ const AdamHead*>(table);
    dynamic_ = head->dynamic;
    grad_scale_ = ScalarAt(head->grad_scale, 1.0f);
    __gm__ const AdamRow* rows = RowsOf<AdamHead, AdamRow>(table);
    groups_ = reinterpret_cast<__gm__ const AdamGroup*>(rows + head->head.parts);
    place_bytes_ = head->tile * 4;
    places_ = head->amsgrad != 0 ? 5 : 4;
    slot_bytes_ = places_ * place_bytes_ + 2 * kSkew;
    pipe_.InitBuffer(slots_, kSlots * slot_bytes_);
    pipe_.InitBuffer(scratch_, place_bytes_ + kSkew);
    if (head->narrow != 0) pipe_.InitBuffer(other_, place_bytes_);
    pipe_.InitBuffer(divisor_, kBlockBytes);
    pipe_.InitBuffer(larger_, head->tile / 8);
    pipe_.InitBuffer(number_, head->tile / 8);
    if (head->head.columns != 0) draws_.Init(pipe_, table, head->head.columns, head->seed);
    if (head->coded != 0) codes_.Init(pipe_, head->tile);
    for (int32_t i = 0; i < kSlots; ++i) {
      loaded_[i] = pipe_.AllocEventID<HardEvent::MTE2_V>();
      updated_[i] = pipe_.AllocEventID<HardEvent::V_MTE3>();
      stored_[i] = pipe_.AllocEventID<HardEvent::MTE3_MTE2>();
      used_[i] = false;
    }
  }

  __aicore__ inline void Run() {
    int32_t slot = 0;
    bool more = tiles_.Next();
    if (more) LoadTile(slot);
    while (more) {
      __gm__ const AdamRow* row = tiles_.row;
      const int64_t at = tiles_.at;
      const int32_t count = tiles_.count;
      const int32_t mine = slot;
      slot = kSlots - 1 - slot;
      more = tiles_.Next();
      if (more) LoadTile(slot);
      TakeGroup(row->group);
      WaitFlag<HardEvent::MTE2_V>(loaded_[mine]);
      Update(row, mine, at, count);
      SetFlag<HardEvent::V_MTE3>(updated_[mine]);
      WaitFlag<HardEvent::V_MTE3>(updated_[mine]);
      StoreTile(row, mine, at, count);
      SetFlag<HardEvent::MTE3_MTE2>(stored_[mine]);
      used_[mine] = true;
    }
    for (int32_t i = 0; i < kSlots; ++i) {
      if (used_[i]) WaitFlag<HardEvent::MTE3_MTE2>(stored_[i]);
    }
  }

 private:
  // A slot's places: master, first and second moment, gradient (then the low copy), greatest second moment. What is
  // bf16 or codes in memory lies in the first half of its place, a master's remainder or the codes' exponents in the
  // second; it is f32 in between. What one instruction takes from two of them, or from one and scratch or other, is out
  // of step: moments, gradient and other with master, greatest second moment and scratch.
  __aicore__ inline LocalTensor<uint8_t> Place(int32_t slot, int32_t place) {
    const int32_t skew = place == 0 ? 0 : (place == 4 ? 2 * kSkew : kSkew);
    return slots_.Get<uint8_t>()[slot * slot_bytes_ + place * place_bytes_ + skew];
  }
  __aicore__ inline LocalTensor<uint8_t> Half(int32_t slot, int32_t place) {
    return Place(slot, place)[place_bytes_ / 2];
  }
  __aicore__ inline LocalTensor<uint8_t> Remainder(int32_t slot) { return Half(slot, 0); }

  __aicore__ inline void LoadTile(int32_t slot) {
    __gm__ const AdamRow* row = tiles_.row;
    const int64_t at = tiles_.at, count = tiles_.count;
    if (used_[slot]) WaitFlag<HardEvent::MTE3_MTE2>(stored_[slot]);
    used_[slot] = false;
    const int32_t master = ItemSize(row->master_dtype), grad = ItemSize(row->grad_dtype);
    npu::Load(Place(slot, 0), row->master + at * master, count * master);
    if (row->remainder != 0) npu::Load(Remainder(slot), row->remainder + at * 2, count * 2);
    const int32_t moment = ItemSize(row->moment_dtype);
    LoadMoment(slot, 1, row->exp_avg, at, count, moment);
    LoadMoment(slot, 2, row->exp_avg_sq, at, count, moment);
    npu::Load(Place(slot, 3), row->grad + at * grad, count * grad);
    if (groups_[row->group].amsgrad != 0) LoadMoment(slot, 4, row->max_exp_avg_sq, at, count, moment);
    SetFlag<HardEvent::MTE2_V>(loaded_[slot]);
  }

  // A tile begins a block of codes.
  __aicore__ inline void LoadMoment(int32_t slot, int32_t place, __gm__ const AdamMoment& moment, int64_t at,
                                    int64_t count, int32_t size) {
    npu::Load(Place(slot, place), moment.values + at * size, count * size);
    if (moment.exponents != 0) {
      npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 1) / kCodeBlock);
    }
  }
  __aicore__ inline void StoreMoment(__gm__ const AdamMoment& moment, int32_t slot, int32_t place, int64_t at,
                                     int64_t count, int32_t size) {
    npu::Store(moment.values + at * size, Place(slot, place), count * size);
    if (moment.exponents != 0) {
      npu::Store(moment.exponents + at / kCodeBlock, Half(slot, place), (count + kCodeBlock - 1) / kCodeBlock);
    }
  }

  __aicore__ inline void StoreTile(__gm__ const AdamRow* row, int32_t slot, int64_t at, int64_t count) {
    const int32_t master = ItemSize(row->master_dtype);
    npu::Store(row->master + at * master, Place(slot, 0), count * master);
    if (row->remainder != 0) npu::Store(row->remainder + at * 2, Remainder(slot), count * 2);
    const int32_t moment = ItemSize(row->moment_dtype);
    StoreMoment(row->exp_avg, slot, 1, at, count, moment);
    StoreMoment(row->exp_avg_sq, slot, 2, at, count, moment);
    if (row->low != 0) npu::Store(row->low + at * 2, Place(slot, 3), count * 2);
    if (amsgrad_) StoreMoment(row->max_exp_avg_sq, slot, 4, at, count, moment);
  }

  // The coefficients of a group, where it is another one than the last tile's.
  __aicore__ inline void TakeGroup(int32_t index) {
    if (index == group_) return;
    group_ = index;
    __gm__ const AdamGroup* group = groups_ + index;
    beta1_ = group->beta1;
    one_minus_beta1_ = group->one_minus_beta1;
    beta2_ = group->beta2;
    one_minus_beta2_ = group->one_minus_beta2;
    eps_ = group->eps;
    weight_decay_ = group->weight_decay;
    l2_ = group->l2 != 0;
    amsgrad_ = group->amsgrad != 0;
    scale_ = group->maximize != 0 ? -grad_scale_ : grad_scale_;
    const bool given = group->row >= 0;
    const uint64_t row = dynamic_ + static_cast<int64_t>(group->row) * kAdamColumns * 4;
    step_size_ = given ? ScalarAt(row, 0.0f) : group->step_size;
    decay_ = given ? ScalarAt(row + 8, 0.0f) : group->decay;
    step_ = given ? static_cast<uint32_t>(ScalarAt(row + 12, 0.0f)) : group->step;
    Duplicate(divisor_.Get<float>(), given ? ScalarAt(row + 4, 0.0f) : group->bias2_sqrt, kBlockBytes / 4);
  }

  __aicore__ inline void Update(__gm__ const AdamRow* row, int32_t slot, int64_t at, int32_t count) {
    const LocalTensor<float> p = Place(slot, 0).ReinterpretCast<float>(), m = Place(slot, 1).ReinterpretCast<float>();
    const LocalTensor<float> v = Place(slot, 2).ReinterpretCast<float>(), g = Place(slot, 3).ReinterpretCast<float>();
    const LocalTensor<float> t = scratch_.Get<float>();
    if (row->moment_dtype != kF32) {
      WidenMoment(slot, 1, row->moment_dtype, count);
      WidenMoment(slot, 2, row->moment_dtype, count);
      if (amsgrad_) WidenMoment(slot, 4, row->moment_dtype, count);
    }
    if (row->remainder != 0) {
      Join(slot, count);
    } else if (row->master_dtype != kF32) {
      WidenPlace(slot, 0, count);
    }
    if (row->grad_dtype == kF32) {
      Muls(g, g, scale_, count);
    } else {
      npu::Widen(t, Place(slot, 3), row->grad_dtype, count);
      PipeBarrier<PIPE_V>();
      Muls(g, t, scale_, count);
    }
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
      const LocalTensor<float> top = Place(slot, 4).ReinterpretCast<float>();
      TakeLarger(top, v, count);
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
    if (row->low != 0) {
      PipeBarrier<PIPE_V>();
      npu::Round(Place(slot, 3), p, row->low_dtype, count, RoundMode::CAST_ROUND);
    }
    if (row->remainder != 0) {
      Split(slot, count);
    } else if (row->master_dtype != kF32) {
      NarrowByChance(slot, 0, kBF16, row, at, row->stream, count);
    }
    if (row->moment_dtype != kF32) {
      NarrowAway(slot, 1, row->moment_dtype, count);
      if (amsgrad_) NarrowAway(slot, 4, row->moment_dtype, count);
      NarrowByChance(slot, 2, row->moment_dtype, row, at, row->stream + 0x80000000u, count);
    }
    // The next tile uses t and rest at once.
    if (row->master_dtype != kF32 || row->moment_dtype != kF32) PipeBarrier<PIPE_V>();
  }

  // A place's bf16 to f32, by way of t.
  __aicore__ inline void WidenPlace(int32_t slot, int32_t place, int32_t count) {
    npu::Widen(scratch_.Get<float>(), Place(slot, place), kBF16, count);
    PipeBarrier<PIPE_V>();
    npu::Copy(Place(slot, place), scratch_.Get<uint8_t>(), 4 * count);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void WidenMoment(int32_t slot, int32_t place, int32_t dtype, int32_t count) {
    if (dtype == kU8) {
      codes_.Widen(Place(slot, place), Half(slot, place), scratch_.Get<float>(), other_.Get<float>(), place == 1,
                   count);
    } else {
      WidenPlace(slot, place, count);
    }
  }

  // And back: to nearest, ties away from zero,
  __aicore__ inline void NarrowAway(int32_t slot, int32_t place, int32_t dtype, int32_t count) {
    if (dtype == kU8) {
      const LocalTensor<float> t = scratch_.Get<float>(), rest = other_.Get<float>();
      if (place == 1) {
        codes_.RoundSigned(Place(slot, place), Half(slot, place), t, rest, count);
      } else {
        codes_.RoundAway(Place(slot, place), Half(slot, place), t, rest, count);
      }
      return;
    }
    PipeBarrier<PIPE_V>();
    npu::Round(scratch_.Get<uint8_t>(), Place(slot, place).ReinterpretCast<float>(), kBF16, count,
               RoundMode::CAST_ROUND);
    PipeBarrier<PIPE_V>();
    npu::Copy(Place(slot, place), scratch_.Get<uint8_t>(), 2 * count);
  }

  // or stochastically, by the draws of a stream.
  __aicore__ inline void NarrowByChance(int32_t slot, int32_t place, int32_t dtype, __gm__ const AdamRow* row,
                                        int64_t at, uint32_t stream, int32_t count) {
    const LocalTensor<float> t = scratch_.Get<float>(), rest = other_.Get<float>();
    // Out of step with what they are added to.
    const bool in_rest = place == 0 || dtype == kU8;
    const LocalTensor<float> bits = in_rest ? rest : t, room = in_rest ? t : rest;
    PipeBarrier<PIPE_V>();
    draws_.Make(bits.ReinterpretCast<int32_t>(), room.ReinterpretCast<int32_t>(),
                row->place + static_cast<uint64_t>(at), stream, step_, count);
    if (dtype == kU8) {
      codes_.RoundByChance(Place(slot, place), Half(slot, place), t, rest, count);
    } else {
      draws_.Round(Place(slot, place), Place(slot, place).ReinterpretCast<float>(), bits.ReinterpretCast<int32_t>(),
                   room, number_.Get<uint8_t>(), count);
    }
  }

  // The master's f32 from its halves: the bits of the bf16, widened, + the remainder.
  __aicore__ inline void Join(int32_t slot, int32_t count) {
    const LocalTensor<float> t = scratch_.Get<float>(), rest = other_.Get<float>();
    const LocalTensor<int32_t> p = Place(slot, 0).ReinterpretCast<int32_t>();
    npu::Widen(t, Place(slot, 0), kBF16, count);
    Cast(rest, Remainder(slot).ReinterpretCast<int16_t>(), RoundMode::CAST_NONE, count);
    PipeBarrier<PIPE_V>();
    Cast(rest.ReinterpretCast<int32_t>(), rest, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Add(p, t.ReinterpretCast<int32_t>(), rest.ReinterpretCast<int32_t>(), count);
    PipeBarrier<PIPE_V>();
  }

  // And its halves; the remainder of NaN is 0.
  __aicore__ inline void Split(int32_t slot, int32_t count) {
    const LocalTensor<float> p = Place(slot, 0).ReinterpretCast<float>(), rest = other_.Get<float>();
    const LocalTensor<uint8_t> upper = scratch_.Get<uint8_t>(), number = number_.Get<uint8_t>();
    PipeBarrier<PIPE_V>();
    npu::Round(upper, p, kBF16, count, RoundMode::CAST_ROUND);
    Compare(number, p, p, CMPMODE::EQ, RoundUp(count, kRepeat));
    PipeBarrier<PIPE_V>();
    npu::Widen(rest, upper, kBF16, count);
    PipeBarrier<PIPE_V>();
    Sub(rest.ReinterpretCast<int32_t>(), p.ReinterpretCast<int32_t>(), rest.ReinterpretCast<int32_t>(), count);
    PipeBarrier<PIPE_V>();
    Cast(rest, rest.ReinterpretCast<int32_t>(), RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Select(rest, number, rest, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    npu::Copy(Place(slot, 0), upper, 2 * count);
    PipeBarrier<PIPE_V>();
    Cast(Remainder(slot).ReinterpretCast<int16_t>(), rest, RoundMode::CAST_RINT, count);
  }

  // top = max(top, v), NaN if either is: Max does not say what it does with one.
  __aicore__ inline void TakeLarger(const LocalTensor<float>& top, const LocalTensor<float>& v, int32_t count) {
    const LocalTensor<uint8_t> larger = larger_.Get<uint8_t>(), number = number_.Get<uint8_t>();
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

  Tiles<AdamHead, AdamRow> tiles_;
  TPipe pipe_;
  TBuf<TPosition::VECCALC> slots_, scratch_, other_, divisor_, larger_, number_;
  Draws draws_;
  Codes codes_;
  TEventID loaded_[kSlots], updated_[kSlots], stored_[kSlots];
  bool used_[kSlots];
  __gm__ const AdamGroup* groups_;
  uint64_t dynamic_;
  int32_t place_bytes_, slot_bytes_, places_;
  uint32_t step_;
  int32_t group_ = -1;
  float grad_scale_, scale_, beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, eps_, weight_decay_, decay_,
      step_size_;
  bool l2_, amsgrad_;
};

__aicore__ inline void RunFlatAdam(GM_ADDR table) {
  // NaN is no zero either: then nothing is written.
  if (!(ScalarAt(reinterpret_cast<__gm__ const AdamHead*>(table)->skip, 0.0f) == 0.0f)) return;
  FlatAdam adam(table);
  adam.Run();
}

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_flat_adam, RunFlatAdam)
