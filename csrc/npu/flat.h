// The walk of core/flat.h's updates. A tile of master, moments and gradient lies in one of two slots, is updated where
// it lies, and is stored from there, while the other slot is loaded or stored; flags of our own order the three pipes,
// since queues would want every tile twice.
//
// A Formula has Group, the table's, and
//   Used(group)               its moments, the first so many
//   Signed(i), ByChance(i)    whether moment i has a sign, and whether it is rounded by chance
//   Init(pipe, tile)          its own place in UB
//   Take(group, dynamic)      takes a group's coefficients, those of its row of dynamic where it has one
//   Apply(tile, count)        the update in place, after its gradient is scaled; one operation is one instruction
//   step                      of the group taken
#pragma once

#include "npu/codes.h"
#include "npu/draws.h"
#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kSlots = 2;

// What a formula works on: master, gradient, moments; t, rest and a mask are room, rest where the head says so
// (`rooms`). What one instruction takes from two of them is out of step if one is master, t or the last of three moments, and the
// other is not.
struct FlatTile {
  LocalTensor<float> p, g, moments[kFlatMoments], t, rest;
  LocalTensor<uint8_t> mask;
};

template <class Formula>
class FlatUpdate {
 public:
  __aicore__ inline explicit FlatUpdate(GM_ADDR table) : tiles_(table) {
    __gm__ const FlatHead* head = reinterpret_cast<__gm__ const FlatHead*>(table);
    dynamic_ = head->dynamic;
    grad_scale_ = ScalarAt(head->grad_scale, 1.0f);
    __gm__ const FlatRow* rows = RowsOf<FlatHead, FlatRow>(table);
    groups_ = reinterpret_cast<__gm__ const typename Formula::Group*>(rows + head->head.parts);
    place_bytes_ = head->tile * 4;
    slot_bytes_ = (kMoments + head->moments) * place_bytes_ + 2 * kSkew;
    pipe_.InitBuffer(slots_, kSlots * slot_bytes_);
    pipe_.InitBuffer(scratch_, place_bytes_ + kSkew);
    rooms_ = head->rooms;
    if (rooms_ > 1) pipe_.InitBuffer(other_, place_bytes_);
    formula_.Init(pipe_, head->tile);
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
      __gm__ const FlatRow* row = tiles_.row;
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
  // A slot's places: master, gradient (then the low copy), moments. What is bf16 or codes in memory lies in the first
  // half of its place, a master's remainder or the codes' exponents in the second; it is f32 in between.
  static constexpr int32_t kGradient = 1, kMoments = 2;

  __aicore__ inline LocalTensor<uint8_t> Place(int32_t slot, int32_t place) {
    const int32_t skew = place == 0 ? 0 : (place == kMoments + kFlatMoments - 1 ? 2 * kSkew : kSkew);
    return slots_.Get<uint8_t>()[slot * slot_bytes_ + place * place_bytes_ + skew];
  }
  __aicore__ inline LocalTensor<uint8_t> Half(int32_t slot, int32_t place) {
    return Place(slot, place)[place_bytes_ / 2];
  }
  __aicore__ inline LocalTensor<uint8_t> Remainder(int32_t slot) { return Half(slot, 0); }

  __aicore__ inline void LoadTile(int32_t slot) {
    __gm__ const FlatRow* row = tiles_.row;
    const int64_t at = tiles_.at, count = tiles_.count;
    if (used_[slot]) WaitFlag<HardEvent::MTE3_MTE2>(stored_[slot]);
    used_[slot] = false;
    const int32_t master = ItemSize(row->master_dtype), grad = ItemSize(row->grad_dtype);
    npu::Load(Place(slot, 0), row->master + at * master, count * master);
    if (row->remainder != 0) npu::Load(Remainder(slot), row->remainder + at * 2, count * 2);
    const int32_t moment = ItemSize(row->moment_dtype), used = Formula::Used(groups_ + row->group);
    for (int32_t i = 0; i < used; ++i) LoadMoment(slot, kMoments + i, row->moments[i], at, count, moment);
    npu::Load(Place(slot, kGradient), row->grad + at * grad, count * grad);
    SetFlag<HardEvent::MTE2_V>(loaded_[slot]);
  }

  // A tile begins a block of codes.
  __aicore__ inline void LoadMoment(int32_t slot, int32_t place, __gm__ const FlatMoment& moment, int64_t at,
                                    int64_t count, int32_t size) {
    npu::Load(Place(slot, place), moment.values + at * size, count * size);
    if (moment.exponents != 0) {
      npu::Load(Half(slot, place), moment.exponents + at / kCodeBlock, (count + kCodeBlock - 1) / kCodeBlock);
    }
  }
  __aicore__ inline void StoreMoment(__gm__ const FlatMoment& moment, int32_t slot, int32_t place, int64_t at,
                                     int64_t count, int32_t size) {
    npu::Store(moment.values + at * size, Place(slot, place), count * size);
    if (moment.exponents != 0) {
      npu::Store(moment.exponents + at / kCodeBlock, Half(slot, place), (count + kCodeBlock - 1) / kCodeBlock);
    }
  }

  __aicore__ inline void StoreTile(__gm__ const FlatRow* row, int32_t slot, int64_t at, int64_t count) {
    const int32_t master = ItemSize(row->master_dtype);
    npu::Store(row->master + at * master, Place(slot, 0), count * master);
    if (row->remainder != 0) npu::Store(row->remainder + at * 2, Remainder(slot), count * 2);
    const int32_t moment = ItemSize(row->moment_dtype);
    for (int32_t i = 0; i < used_moments_; ++i) StoreMoment(row->moments[i], slot, kMoments + i, at, count, moment);
    if (row->low != 0) npu::Store(row->low + at * 2, Place(slot, kGradient), count * 2);
  }

  // The coefficients of a group, where it is another one than the last tile's.
  __aicore__ inline void TakeGroup(int32_t index) {
    if (index == group_) return;
    group_ = index;
    __gm__ const typename Formula::Group* group = groups_ + index;
    scale_ = group->maximize != 0 ? -grad_scale_ : grad_scale_;
    used_moments_ = Formula::Used(group);
    formula_.Take(group, dynamic_);
  }

  __aicore__ inline void Update(__gm__ const FlatRow* row, int32_t slot, int64_t at, int32_t count) {
    FlatTile tile;
    tile.p = Place(slot, 0).template ReinterpretCast<float>();
    tile.g = Place(slot, kGradient).template ReinterpretCast<float>();
    tile.t = scratch_.Get<float>();
    if (rooms_ > 1) tile.rest = other_.Get<float>();
    tile.mask = number_.Get<uint8_t>();
    for (int32_t i = 0; i < used_moments_; ++i) {
      tile.moments[i] = Place(slot, kMoments + i).template ReinterpretCast<float>();
      if (row->moment_dtype != kF32) WidenMoment(slot, i, row->moment_dtype, count);
    }
    if (row->remainder != 0) {
      Join(slot, count);
    } else if (row->master_dtype != kF32) {
      WidenPlace(slot, 0, count);
    }
    if (row->grad_dtype == kF32) {
      Muls(tile.g, tile.g, scale_, count);
    } else {
      npu::Widen(tile.t, Place(slot, kGradient), row->grad_dtype, count);
      PipeBarrier<PIPE_V>();
      Muls(tile.g, tile.t, scale_, count);
    }
    formula_.Apply(tile, count);
    if (row->low != 0) {
      PipeBarrier<PIPE_V>();
      npu::Round(Place(slot, kGradient), tile.p, row->low_dtype, count, RoundMode::CAST_ROUND);
    }
    if (row->remainder != 0) {
      Split(slot, count);
    } else if (row->master_dtype != kF32) {
      NarrowByChance(slot, 0, kBF16, row, at, row->stream, count);
    }
    if (row->moment_dtype != kF32) {
      for (int32_t i = 0; i < used_moments_; ++i) NarrowMoment(row, slot, i, at, count);
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

  __aicore__ inline void WidenMoment(int32_t slot, int32_t i, int32_t dtype, int32_t count) {
    const int32_t place = kMoments + i;
    if (dtype == kU8) {
      codes_.Widen(Place(slot, place), Half(slot, place), scratch_.Get<float>(), other_.Get<float>(),
                   Formula::Signed(i), count);
    } else {
      WidenPlace(slot, place, count);
    }
  }

  __aicore__ inline void NarrowMoment(__gm__ const FlatRow* row, int32_t slot, int32_t i, int64_t at, int32_t count) {
    if (Formula::ByChance(i)) {
      NarrowByChance(slot, kMoments + i, row->moment_dtype, row, at, row->stream + 0x80000000u, count);
    } else {
      NarrowAway(slot, i, row->moment_dtype, count);
    }
  }

  // And back: to nearest, ties away from zero,
  __aicore__ inline void NarrowAway(int32_t slot, int32_t i, int32_t dtype, int32_t count) {
    const int32_t place = kMoments + i;
    if (dtype == kU8) {
      const LocalTensor<float> t = scratch_.Get<float>(), rest = other_.Get<float>();
      if (Formula::Signed(i)) {
        codes_.RoundSigned(Place(slot, place), Half(slot, place), t, rest, count);
      } else {
        codes_.RoundAway(Place(slot, place), Half(slot, place), t, rest, count);
      }
      return;
    }
    PipeBarrier<PIPE_V>();
    npu::Round(scratch_.Get<uint8_t>(), Place(slot, place).template ReinterpretCast<float>(), kBF16, count,
               RoundMode::CAST_ROUND);
    PipeBarrier<PIPE_V>();
    npu::Copy(Place(slot, place), scratch_.Get<uint8_t>(), 2 * count);
  }

  // or stochastically, by the draws of a stream.
  __aicore__ inline void NarrowByChance(int32_t slot, int32_t place, int32_t dtype, __gm__ const FlatRow* row,
                                        int64_t at, uint32_t stream, int32_t count) {
    const LocalTensor<float> t = scratch_.Get<float>(), rest = other_.Get<float>();
    // Out of step with what they are added to.
    const bool in_rest = place == 0 || dtype == kU8;
    const LocalTensor<float> bits = in_rest ? rest : t, room = in_rest ? t : rest;
    PipeBarrier<PIPE_V>();
    draws_.Make(bits.ReinterpretCast<int32_t>(), room.ReinterpretCast<int32_t>(),
                row->place + static_cast<uint64_t>(at), stream, formula_.step, count);
    if (dtype == kU8) {
      codes_.RoundByChance(Place(slot, place), Half(slot, place), t, rest, Formula::Signed(place - kMoments), count);
    } else {
      draws_.Round(Place(slot, place), Place(slot, place).template ReinterpretCast<float>(),
                   bits.ReinterpretCast<int32_t>(), room, number_.Get<uint8_t>(), count);
    }
  }

  // The master's f32 from its halves: the bits of the bf16, widened, + the remainder.
  __aicore__ inline void Join(int32_t slot, int32_t count) {
    const LocalTensor<float> t = scratch_.Get<float>(), rest = other_.Get<float>();
    const LocalTensor<int32_t> p = Place(slot, 0).template ReinterpretCast<int32_t>();
    npu::Widen(t, Place(slot, 0), kBF16, count);
    Cast(rest, Remainder(slot).template ReinterpretCast<int16_t>(), RoundMode::CAST_NONE, count);
    PipeBarrier<PIPE_V>();
    Cast(rest.ReinterpretCast<int32_t>(), rest, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    Add(p, t.ReinterpretCast<int32_t>(), rest.ReinterpretCast<int32_t>(), count);
    PipeBarrier<PIPE_V>();
  }

  // And its halves; the remainder of NaN is 0.
  __aicore__ inline void Split(int32_t slot, int32_t count) {
    const LocalTensor<float> p = Place(slot, 0).template ReinterpretCast<float>(), rest = other_.Get<float>();
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
    Cast(Remainder(slot).template ReinterpretCast<int16_t>(), rest, RoundMode::CAST_RINT, count);
  }

  Tiles<FlatHead, FlatRow> tiles_;
  TPipe pipe_;
  TBuf<TPosition::VECCALC> slots_, scratch_, other_, number_;
  Formula formula_;
  Draws draws_;
  Codes codes_;
  TEventID loaded_[kSlots], updated_[kSlots], stored_[kSlots];
  bool used_[kSlots];
  __gm__ const typename Formula::Group* groups_;
  uint64_t dynamic_;
  int32_t place_bytes_, slot_bytes_, rooms_, used_moments_;
  int32_t group_ = -1;
  float grad_scale_, scale_;
};

template <class Formula>
__aicore__ inline void RunFlat(GM_ADDR table) {
  // NaN is no zero either: then nothing is written.
  if (!(ScalarAt(reinterpret_cast<__gm__ const FlatHead*>(table)->skip, 0.0f) == 0.0f)) return;
  FlatUpdate<Formula> update(table);
  update.Run();
}

}  // namespace npu
}  // namespace npuzero
