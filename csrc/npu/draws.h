// Draws for stochastic rounding, as ops/cast.h has them, 16 bits in a lane of 32. With C and R the words of column and
// row, a = C >> 17 and x = R >> 19, mod 2^16
//   C + R + (a + x)^2 = 2 x a + (C + a^2) + (R + x^2)
// so of a column are needed a and 16 bits of (C + a^2), of a row 2 x and 16 bits of (R + x^2): no integer overflows,
// which matters since the documentation does not say what vectors do then. Columns come with the launch's table, words
// of rows are computed by the scalar unit, four at once.
#pragma once

#include "npu/walk.h"

namespace npuzero {
namespace npu {

class Draws {
 public:
  // table: a launch's; columns: where in it they are, in bytes (table.h).
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR table, int64_t columns, uint64_t seed) {
    columns_at_ = reinterpret_cast<uint64_t>(table + columns);
    seed_ = seed;
    pipe.InitBuffer(columns_, 2 * kDrawTable * 4);
    pipe.InitBuffer(halves_, 2 * kBlockBytes);
    Duplicate(Half(0), 0xffff, kLanes);
    Duplicate(Half(1), static_cast<int32_t>(0xffff0000), kLanes);
    loaded_ = pipe.AllocEventID<HardEvent::MTE2_V>();
    used_ = pipe.AllocEventID<HardEvent::V_MTE2>();
  }

  // The draws of places index, index + 1, ...; room is as many lanes. Both are whole repeats.
  __aicore__ inline void Make(const LocalTensor<int32_t>& bits, const LocalTensor<int32_t>& room, uint64_t index,
                              uint32_t stream, uint32_t step, int32_t count) {
    Align(static_cast<int32_t>((kLanes - index % kLanes) % kLanes));
    const LocalTensor<int32_t> factor = columns_.Get<int32_t>(), sum = factor[kDrawTable];
    const uint64_t first = index / kDrawColumns;
    const int32_t column = static_cast<int32_t>(index % kDrawColumns);
    // From the last row to the first: where rows begin within a block, a row begins with lanes of the one before it.
    for (int32_t row = (column + count - 1) / kDrawColumns; row >= 0; --row) {
      const int32_t place = row == 0 ? column + lead_ : 0;  // among the columns
      const int32_t begin = row * kDrawColumns + place - column - lead_, end = (row + 1) * kDrawColumns - column;
      const int32_t lanes = (end < count ? end : count) - begin;
      const uint32_t word = WordOf(first + row, stream, step), x = word >> 19;
      Muls(bits[begin], factor[place], static_cast<int32_t>(2 * x), lanes);
      Adds(room[begin], sum[place], static_cast<int32_t>((word + x * x) & 0xffff), lanes);
      if (lead_ != 0) PipeBarrier<PIPE_V>();
    }
    PipeBarrier<PIPE_V>();
    Add(bits, bits, room, count);
    PipeBarrier<PIPE_V>();
    Keep(bits, 0, count);
    PipeBarrier<PIPE_V>();
  }

  // f32 to bf16, stochastically, by Make's bits, which it uses up: pattern plus bits, and the low half cleared, is a
  // bf16 already; infinity and NaN as they are. room is as Make's, mask a bit for each lane.
  __aicore__ inline void Round(const LocalTensor<uint8_t>& to, const LocalTensor<float>& from,
                               const LocalTensor<int32_t>& bits, const LocalTensor<float>& room,
                               const LocalTensor<uint8_t>& mask, int32_t count) {
    Add(bits, from.ReinterpretCast<int32_t>(), bits, count);
    Abs(room, from, count);
    PipeBarrier<PIPE_V>();
    Keep(bits, 1, count);
    CompareScalar(mask, room, kLargest, CMPMODE::LE, RoundUp(count, kRepeat));
    PipeBarrier<PIPE_V>();
    const LocalTensor<float> sum = bits.ReinterpretCast<float>();
    Select(sum, mask, sum, from, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
    PipeBarrier<PIPE_V>();
    Cast(to.ReinterpretCast<bfloat16_t>(), sum, RoundMode::CAST_RINT, count);
  }

 private:
  static constexpr int32_t kLanes = kBlockBytes / 4;
  static constexpr uint64_t kNone = ~static_cast<uint64_t>(0);

  // Four rows' words: of one counter, of which kNone is none.
  struct Words {
    uint64_t counter = kNone;
    uint32_t stream, step, word[4];
  };

  __aicore__ inline LocalTensor<int32_t> Half(int32_t upper) { return halves_.Get<int32_t>()[upper * kLanes]; }

  // Of each lane one half.
  __aicore__ inline void Keep(const LocalTensor<int32_t>& lanes, int32_t upper, int32_t count) {
    const uint8_t repeats = static_cast<uint8_t>(RoundUp(count, kRepeat) / kRepeat);
    const LocalTensor<uint16_t> halves = lanes.ReinterpretCast<uint16_t>();
    And(halves, halves, Half(upper).ReinterpretCast<uint16_t>(), static_cast<uint64_t>(2 * kRepeat), repeats,
        BinaryRepeatParams(1, 1, 0, 8, 8, 0));
  }

  // The columns so that a row that begins `lead` lanes after a block's begin finds its own behind as many others: an
  // address in UB is a block's. Tensors that are part of a flat never ask for another lead than 0.
  __aicore__ inline void Align(int32_t lead) {
    if (lead == lead_) return;
    lead_ = lead;
    SetFlag<HardEvent::V_MTE2>(used_);
    WaitFlag<HardEvent::V_MTE2>(used_);
    for (int32_t i = 0; i < 2; ++i) {
      npu::Load(columns_.Get<uint8_t>()[i * kDrawTable * 4], columns_at_ + (i * kDrawTable + kLanes - lead) * 4,
                (kDrawColumns + lead) * 4);
    }
    SetFlag<HardEvent::MTE2_V>(loaded_);
    WaitFlag<HardEvent::MTE2_V>(loaded_);
  }

  // Of a tensor's two streams, which a tile takes turns with (ops/flat_adam.h), four words are kept each.
  __aicore__ inline uint32_t WordOf(uint64_t row, uint32_t stream, uint32_t step) {
    Words& words = words_[stream >> 31];
    if (words.counter != row / 4 || words.stream != stream || words.step != step) {
      words.counter = row / 4;
      words.stream = stream;
      words.step = step;
      Philox(words);
    }
    return words.word[row % 4];
  }

  // Philox4x32-10.
  __aicore__ inline void Philox(Words& words) {
    uint32_t c0 = static_cast<uint32_t>(words.counter), c1 = static_cast<uint32_t>(words.counter >> 32);
    uint32_t c2 = words.stream, c3 = words.step;
    uint32_t k0 = static_cast<uint32_t>(seed_), k1 = static_cast<uint32_t>(seed_ >> 32);
    for (int32_t round = 0; round < 10; ++round) {
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words.word[0] = c0;
    words.word[1] = c1;
    words.word[2] = c2;
    words.word[3] = c3;
  }

  TBuf<TPosition::VECCALC> columns_, halves_;
  Words words_[2];
  TEventID loaded_, used_;
  uint64_t columns_at_, seed_;
  int32_t lead_ = -1;
};

}  // namespace npu
}  // namespace npuzero
