// Random numbers for stochastic rounding: Philox4x32-10 as ops/cast.h has it, by 32-bit integer vector instructions
// that cannot overflow, since the documentation does not say what they do then, nor is there a high half of a product.
// A number of 32 bits is two halves of 16 bits in two arrays, a lane for each draw; products are of a half and a byte.
#pragma once

#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kDrawn = 8;  // elements that a draw serves, 16 bits each

class Draws {
 public:
  // For tiles of at most `tile` elements.
  __aicore__ inline void Init(TPipe& pipe, int32_t tile) {
    tile_ = tile;
    stride_ = tile / kDrawn + kDrawn;
    pipe.InitBuffer(arrays_, kArrays * stride_ * 4);
    pipe.InitBuffer(places_, tile * 4);
    pipe.InitBuffer(bits_, tile * 4);
    read_ = pipe.AllocEventID<HardEvent::V_S>();
    begun_ = pipe.AllocEventID<HardEvent::S_V>();
    Duplicate(At(kByte), 0xff, stride_);
    Duplicate(At(kHalf), 0xffff, stride_);
  }

  // 16 bits for each of `count` elements, in lanes of 32; `place` is the first one's in the whole. The counter's upper
  // words are stream and step.
  __aicore__ inline LocalTensor<int32_t> Make(uint64_t seed, uint64_t place, uint32_t stream, uint32_t step,
                                              int32_t count) {
    const int32_t phase = static_cast<int32_t>(place % kDrawn);
    lanes_ = (phase + count + kDrawn - 1) / kDrawn;
    Begin(place / kDrawn, stream, step);
    uint32_t key = static_cast<uint32_t>(seed), other_key = static_cast<uint32_t>(seed >> 32);
    int32_t state = 0;
    for (int32_t round = 0; round < 10; ++round) {
      Turn(state, kSet - state, key, other_key);
      state = kSet - state;
      key += 0x9E3779B9u;
      other_key += 0xBB67AE85u;
    }
    if (phase != phase_) FindPlaces(phase);
    Gather(bits_.Get<int32_t>(), At(0), places_.Get<uint32_t>(), 0u, static_cast<uint32_t>(count));
    PipeBarrier<PIPE_V>();
    return bits_.Get<int32_t>();
  }

  // f32 to bf16, stochastically, by way of Make's bits, which it uses up: pattern plus bits, and the low half cleared,
  // is a bf16 already; infinity and NaN as they are.
  __aicore__ inline void Round(const LocalTensor<uint8_t>& to, const LocalTensor<float>& from,
                               const LocalTensor<float>& room, const LocalTensor<uint8_t>& mask, int32_t count) {
    const LocalTensor<int32_t> sum = bits_.Get<int32_t>();
    const LocalTensor<uint32_t> pattern = sum.ReinterpretCast<uint32_t>();
    Add(sum, from.ReinterpretCast<int32_t>(), sum, count);
    PipeBarrier<PIPE_V>();
    ShiftRight(pattern, pattern, 16u, count);
    PipeBarrier<PIPE_V>();
    ShiftLeft(pattern, pattern, 16u, count);
    npu::KeepSpecial(sum.ReinterpretCast<float>(), from, room, mask, count);
    PipeBarrier<PIPE_V>();
    Cast(to.ReinterpretCast<bfloat16_t>(), sum.ReinterpretCast<float>(), RoundMode::CAST_RINT, count);
  }

 private:
  // Two sets of arrays, the state and the next one; in each the halves (low, high) of words 3, 2, 1 and 0 of the
  // counter. A product's four halves fall where the next state has them. Then room, and two patterns.
  static constexpr int32_t kSet = 8;
  static constexpr int32_t kRoom = 16;
  static constexpr int32_t kByte = 24;
  static constexpr int32_t kHalf = 25;
  static constexpr int32_t kArrays = 26;

  __aicore__ inline LocalTensor<int32_t> At(int32_t i) { return arrays_.Get<int32_t>()[i * stride_]; }

  __aicore__ inline void Mask(int32_t to, int32_t from, int32_t pattern) {
    And(At(to).ReinterpretCast<uint16_t>(), At(from).ReinterpretCast<uint16_t>(),
        At(pattern).ReinterpretCast<uint16_t>(), 2 * lanes_);
  }

  // Counters first, first + 1, ... in words 0 and 1.
  __aicore__ inline void Begin(uint64_t first, uint32_t stream, uint32_t step) {
    Duplicate(At(2), static_cast<int32_t>(stream & 0xffff), lanes_);
    Duplicate(At(3), static_cast<int32_t>(stream >> 16), lanes_);
    Duplicate(At(0), static_cast<int32_t>(step & 0xffff), lanes_);
    Duplicate(At(1), static_cast<int32_t>(step >> 16), lanes_);
    CountFrom(At(6), static_cast<int32_t>(first & 0xffff), lanes_);
    PipeBarrier<PIPE_V>();
    Carry(7, 6, static_cast<int32_t>((first >> 16) & 0xffff));
    Carry(4, 7, static_cast<int32_t>((first >> 32) & 0xffff));
    Carry(5, 4, static_cast<int32_t>((first >> 48) & 0xffff));
  }

  // first, first + 1, ...: of which the scalar unit stores the beginning.
  __aicore__ inline void CountFrom(const LocalTensor<int32_t>& to, int32_t first, int32_t count) {
    SetFlag<HardEvent::V_S>(read_);
    WaitFlag<HardEvent::V_S>(read_);
    CreateVecIndex(to, first, static_cast<uint32_t>(count));
    SetFlag<HardEvent::S_V>(begun_);
    WaitFlag<HardEvent::S_V>(begun_);
  }

  // upper = half + what array `lower` has beyond 16 bits, and that taken away there.
  __aicore__ inline void Carry(int32_t upper, int32_t lower, int32_t half) {
    ShiftRight(At(upper), At(lower), 16, lanes_);
    PipeBarrier<PIPE_V>();
    Adds(At(upper), At(upper), half, lanes_);
    Mask(lower, lower, kHalf);
    PipeBarrier<PIPE_V>();
  }

  // Arrays to .. to + 3: the 64 bits of the number in arrays from (low half), from + 1 (high half) times `factor`.
  __aicore__ inline void Multiply(int32_t to, int32_t from, uint32_t factor) {
    const int32_t b0 = factor & 0xff, b1 = (factor >> 8) & 0xff, b2 = (factor >> 16) & 0xff, b3 = factor >> 24;
    const LocalTensor<int32_t> low = At(from), high = At(from + 1);
    // Sums of products by the byte they begin at, all below 2^25.
    const LocalTensor<int32_t> s0 = At(kRoom), s1 = At(kRoom + 1), s2 = At(kRoom + 2), s3 = At(kRoom + 3);
    const LocalTensor<int32_t> s4 = At(kRoom + 4), s5 = At(kRoom + 5), t = At(kRoom + 6), u = At(kRoom + 7);
    Muls(s0, low, b0, lanes_);
    Muls(s1, low, b1, lanes_);
    Muls(s2, low, b2, lanes_);
    Muls(s3, low, b3, lanes_);
    Muls(t, high, b0, lanes_);
    Muls(u, high, b1, lanes_);
    Muls(s4, high, b2, lanes_);
    Muls(s5, high, b3, lanes_);
    PipeBarrier<PIPE_V>();
    Add(s2, s2, t, lanes_);
    Add(s3, s3, u, lanes_);
    // Those at odd bytes give their low byte to the half below and the rest to the one above.
    Mask(to, kRoom + 1, kByte);
    Mask(to + 2, kRoom + 5, kByte);
    PipeBarrier<PIPE_V>();
    Mask(to + 1, kRoom + 3, kByte);
    ShiftLeft(At(to), At(to), 8, lanes_);
    ShiftLeft(At(to + 2), At(to + 2), 8, lanes_);
    ShiftRight(s1, s1, 8, lanes_);
    ShiftRight(At(to + 3), s5, 8, lanes_);
    PipeBarrier<PIPE_V>();
    ShiftLeft(At(to + 1), At(to + 1), 8, lanes_);
    ShiftRight(s3, s3, 8, lanes_);
    Add(At(to), At(to), s0, lanes_);
    Add(s2, s2, s1, lanes_);
    Add(At(to + 2), At(to + 2), s4, lanes_);
    PipeBarrier<PIPE_V>();
    Add(At(to + 1), At(to + 1), s2, lanes_);
    Add(At(to + 2), At(to + 2), s3, lanes_);
    for (int32_t i = 0; i < 3; ++i) {
      ShiftRight(t, At(to + i), 16, lanes_);
      PipeBarrier<PIPE_V>();
      Mask(to + i, to + i, kHalf);
      Add(At(to + i + 1), At(to + i + 1), t, lanes_);
      PipeBarrier<PIPE_V>();
    }
  }

  // Four arrays at once: to = one ^ other, as what either has less what both have. `to` is none of the others.
  __aicore__ inline void Xor(const int32_t (&to)[4], const int32_t (&one)[4], const int32_t (&other)[4]) {
    for (int32_t i = 0; i < 4; ++i) {
      Or(At(kRoom + 4 + i).ReinterpretCast<uint16_t>(), At(one[i]).ReinterpretCast<uint16_t>(),
         At(other[i]).ReinterpretCast<uint16_t>(), 2 * lanes_);
      Mask(to[i], one[i], other[i]);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < 4; ++i) Sub(At(to[i]), At(kRoom + 4 + i), At(to[i]), lanes_);
    PipeBarrier<PIPE_V>();
  }

  // One round, from the set of arrays at `old` to that at `next`.
  __aicore__ inline void Turn(int32_t old, int32_t next, uint32_t key, uint32_t other_key) {
    Multiply(next, old + 6, 0xD2511F53u);
    Multiply(next + 4, old + 2, 0xCD9E8D57u);
    Duplicate(At(kRoom), static_cast<int32_t>(key & 0xffff), lanes_);
    Duplicate(At(kRoom + 1), static_cast<int32_t>(key >> 16), lanes_);
    Duplicate(At(kRoom + 2), static_cast<int32_t>(other_key & 0xffff), lanes_);
    Duplicate(At(kRoom + 3), static_cast<int32_t>(other_key >> 16), lanes_);
    const int32_t words[] = {old + 6, old + 7, old + 2, old + 3}, products[] = {next + 6, next + 7, next + 2, next + 3};
    const int32_t neighbours[] = {old + 4, old + 5, old, old + 1}, keys[] = {kRoom, kRoom + 1, kRoom + 2, kRoom + 3};
    Xor(words, products, neighbours);
    Xor(products, words, keys);
  }

  // Where an element's bits lie in the first set: of place p, half j = p mod 8 of draw p div 8, and half j is array
  // 6 + j - 4 (j div 2). In bytes, by p, p div 8 and p div 2.
  __aicore__ inline void FindPlaces(int32_t phase) {
    phase_ = phase;
    const int32_t count = tile_;
    const LocalTensor<int32_t> places = places_.Get<int32_t>(), eighth = bits_.Get<int32_t>(), half = At(kSet);
    CountFrom(places, phase, count);
    PipeBarrier<PIPE_V>();
    ShiftRight(eighth, places, 3, count);
    ShiftRight(half, places, 1, count);
    PipeBarrier<PIPE_V>();
    Muls(places, places, 4 * stride_, count);
    Muls(eighth, eighth, 32 * stride_ + 4, count);
    Muls(half, half, 16 * stride_, count);
    PipeBarrier<PIPE_V>();
    Add(places, places, eighth, count);
    PipeBarrier<PIPE_V>();
    Sub(places, places, half, count);
    PipeBarrier<PIPE_V>();
    Adds(places, places, 24 * stride_, count);
    PipeBarrier<PIPE_V>();
  }

  TBuf<TPosition::VECCALC> arrays_, places_, bits_;
  TEventID read_, begun_;
  int32_t tile_, stride_, lanes_, phase_ = -1;
};

}  // namespace npu
}  // namespace npuzero
