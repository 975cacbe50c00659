// The contract is in ops/norm.h; the vector unit has no float64, so squares are sums of two floats here.
//
// A block is scaled by a power of two that brings its largest magnitude to 2^20, squared without error (Dekker: "A
// floating-point technique for extending the available precision", 1971: halves of 12 bits, whose products are exact),
// and added up as a tree of pairs (Knuth's two-sum), to eight pairs. These are added exactly, as integers of many
// digits. So the result depends on the blocks alone, not on how cores share them; a block's tree is within 2^-43 of its
// sum.
#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kDigits = 24;    // of 32 bits each
constexpr int32_t kLowest = -448;  // exponent of the lowest digit's unit
constexpr int32_t kLanes = 8;      // where the tree ends: one 32-byte block

// An f32 and its pattern.
union Bits {
  uint32_t pattern;
  float value;
};

// A sum without error, kept in digits that are not carried until the end, and what is not finite.
struct ExactSum {
  int64_t digits[kDigits];
  int64_t bad;
  int64_t nans;
};

__aicore__ inline void Clear(ExactSum& sum) {
  for (int32_t i = 0; i < kDigits; ++i) sum.digits[i] = 0;
  sum.bad = 0;
  sum.nans = 0;
}

// sum += the f32 of this pattern * 2^exponent
__aicore__ inline void AddPattern(ExactSum& sum, uint32_t pattern, int32_t exponent) {
  const int32_t field = static_cast<int32_t>((pattern >> 23) & 0xff);
  const uint64_t mantissa = (pattern & 0x7fffff) | (field == 0 ? 0u : 0x800000u);
  const int32_t place = (field == 0 ? 1 : field) - 150 + exponent - kLowest;
  const uint64_t shifted = mantissa << (place & 31);
  const int64_t low = static_cast<int64_t>(shifted & 0xffffffff), high = static_cast<int64_t>(shifted >> 32);
  const bool negative = (pattern >> 31) != 0;
  sum.digits[place >> 5] += negative ? -low : low;
  sum.digits[(place >> 5) + 1] += negative ? -high : high;
}

// The float64 pattern of a number that is not negative, rounded to nearest even.
__aicore__ inline uint64_t DoubleOf(ExactSum& sum) {
  int32_t top = -1;
  for (int32_t i = 0; i < kDigits; ++i) {
    if (i + 1 < kDigits) sum.digits[i + 1] += sum.digits[i] >> 32;
    sum.digits[i] &= 0xffffffff;
    if (sum.digits[i] != 0) top = i;
  }
  if (top < 0) return 0;
  uint64_t mantissa = static_cast<uint64_t>(sum.digits[top]) << 32;
  if (top > 0) mantissa |= static_cast<uint64_t>(sum.digits[top - 1]);
  uint64_t rest = top > 1 ? static_cast<uint64_t>(sum.digits[top - 2]) << 32 : 0;
  for (int32_t i = 0; i + 2 < top; ++i) {
    if (sum.digits[i] != 0) rest |= 1;
  }
  int32_t exponent = kLowest + 32 * (top - 1) + 63;  // of the mantissa's highest bit
  while ((mantissa >> 63) == 0) {
    mantissa = (mantissa << 1) | (rest >> 63);
    rest <<= 1;
    exponent -= 1;
  }
  const uint64_t dropped = mantissa & 0x7ff;
  uint64_t kept = mantissa >> 11;
  if (dropped > 0x400 || (dropped == 0x400 && (rest != 0 || (kept & 1) != 0))) kept += 1;
  // A carry out of the 53 bits leaves them zero and moves the exponent, by plain addition.
  return (static_cast<uint64_t>(exponent + 1022) << 52) + kept;
}

__aicore__ inline uint64_t DoubleOfCount(int64_t count) {
  ExactSum sum;
  Clear(sum);
  sum.digits[-kLowest / 32] = count & 0xffffffff;
  sum.digits[-kLowest / 32 + 1] = count >> 32;
  return DoubleOf(sum);
}

// What the scalar unit has put into UB goes to GM.
__aicore__ inline void StoreWords(uint64_t to, const LocalTensor<uint8_t>& from, int32_t bytes, TEventID written) {
  SetFlag<HardEvent::S_MTE3>(written);
  WaitFlag<HardEvent::S_MTE3>(written);
  npu::Store(to, from, bytes);
}

__aicore__ inline void SetLong(const LocalTensor<uint32_t>& words, int32_t index, uint64_t value) {
  words.SetValue(2 * index, static_cast<uint32_t>(value));
  words.SetValue(2 * index + 1, static_cast<uint32_t>(value >> 32));
}

__aicore__ inline uint64_t GetLong(const LocalTensor<uint32_t>& words, int32_t index) {
  return words.GetValue(2 * index) | static_cast<uint64_t>(words.GetValue(2 * index + 1)) << 32;
}

__aicore__ inline void StoreResult(uint64_t out, ExactSum& sum, const LocalTensor<uint8_t>& room, TEventID written) {
  const LocalTensor<uint32_t> words = room.ReinterpretCast<uint32_t>();
  const uint64_t bad = DoubleOfCount(sum.bad);
  const uint64_t total = sum.nans != 0 ? 0x7ff8000000000000u : (sum.bad != 0 ? 0x7ff0000000000000u : DoubleOf(sum));
  npu::SetLong(words, 0, total);
  npu::SetLong(words, 1, bad);
  npu::StoreWords(out, room, 16, written);
}

class Norm {
 public:
  __aicore__ inline explicit Norm(GM_ADDR table) {
    head_ = reinterpret_cast<__gm__ const NormHead*>(table);
    __gm__ const Share* share = reinterpret_cast<__gm__ const Share*>(table + sizeof(NormHead)) + GetBlockIdx();
    at_ = share->begin;
    end_ = share->end;
    scale_ = head_->scale;
    pipe_.InitBuffer(in_, 2, 2 * kSlotBytes);
    pipe_.InitBuffer(out_, 2, kSlotBytes);
    pipe_.InitBuffer(room_, 4 * kSlotBytes);
    pipe_.InitBuffer(words_, kNormBytes);
    computed_ = pipe_.AllocEventID<HardEvent::V_S>();
    read_ = pipe_.AllocEventID<HardEvent::S_V>();
    written_ = pipe_.AllocEventID<HardEvent::S_MTE3>();
    Clear(sum_);
  }

  __aicore__ inline void Run() {
    bool more = at_ < end_;
    if (more) LoadBlock(at_);
    while (more) {
      const int64_t at = at_;
      const int32_t count = Count(at);
      at_ += count;
      more = at_ < end_;
      if (more) LoadBlock(at_);
      Block(at, count);
    }
    if (GetBlockNum() == 1) {
      npu::StoreResult(head_->out, sum_, words_.Get<uint8_t>(), written_);
      return;
    }
    const LocalTensor<uint32_t> words = words_.Get<uint32_t>();
    for (int32_t i = 0; i < kDigits; ++i) npu::SetLong(words, i, static_cast<uint64_t>(sum_.digits[i]));
    npu::SetLong(words, kDigits, static_cast<uint64_t>(sum_.bad));
    npu::SetLong(words, kDigits + 1, static_cast<uint64_t>(sum_.nans));
    npu::StoreWords(head_->workspace + GetBlockIdx() * kNormBytes, words_.Get<uint8_t>(), 8 * (kDigits + 2), written_);
  }

 private:
  __aicore__ inline int32_t Count(int64_t at) {
    return static_cast<int32_t>(end_ - at < kNormBlock ? end_ - at : kNormBlock);
  }

  __aicore__ inline void LoadBlock(int64_t at) {
    LocalTensor<uint8_t> in = in_.AllocTensor<uint8_t>();
    const int32_t size = ItemSize(head_->x_dtype), count = Count(at);
    npu::Load(in, head_->x + at * size, count * size);
    if (head_->addend != 0) {
      const int32_t other = ItemSize(head_->addend_dtype);
      npu::Load(in[kSlotBytes], head_->addend + at * other, count * other);
    }
    in_.EnQue(in);
  }

  __aicore__ inline LocalTensor<float> Room(int32_t i) {
    return room_.Get<uint8_t>()[i * kSlotBytes].ReinterpretCast<float>();
  }

  __aicore__ inline void Block(int64_t at, int32_t count) {
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    LocalTensor<float> x = in.ReinterpretCast<float>();
    if (head_->addend != 0) {
      Accumulate(x, in[kSlotBytes], at, count);
    } else if (head_->x_dtype != kF32) {
      x = Room(3);
      npu::Widen(x, in, head_->x_dtype, count);
      PipeBarrier<PIPE_V>();
    }
    // The tree halves a power of two; what the block does not have is zeros.
    int32_t width = kLanes;
    while (width < count) width *= 2;
    const int32_t most = Largest(x, count, width);
    if (most >= kInfinity) {
      Spoil(x, count, width, most);
    } else {
      Square(x, count, width, most);
    }
    in_.FreeTensor(in);
  }

  // x = x + f32(addend) * scale, in place and back to GM.
  __aicore__ inline void Accumulate(const LocalTensor<float>& x, const LocalTensor<uint8_t>& addend, int64_t at,
                                    int32_t count) {
    LocalTensor<float> t = Room(3);
    if (head_->addend_dtype == kF32) {
      Muls(t, addend.ReinterpretCast<float>(), scale_, count);
    } else {
      npu::Widen(t, addend, head_->addend_dtype, count);
      PipeBarrier<PIPE_V>();
      Muls(t, t, scale_, count);
    }
    PipeBarrier<PIPE_V>();
    Add(x, x, t, count);
    PipeBarrier<PIPE_V>();
    LocalTensor<uint8_t> out = out_.AllocTensor<uint8_t>();
    npu::Copy(out, x.ReinterpretCast<uint8_t>(), 4 * count);
    out_.EnQue(out);
    LocalTensor<uint8_t> done = out_.DeQue<uint8_t>();
    npu::Store(head_->x + at * 4, done, count * 4);
    out_.FreeTensor(done);
  }

  // t's first `width` elements to zero beyond `count`, t to be written up to there by the next instructions.
  __aicore__ inline void Pad(const LocalTensor<float>& t, int32_t count, int32_t width) {
    if (count == width) return;
    Duplicate(t, 0.0f, width);
    PipeBarrier<PIPE_V>();
  }

  // The pattern of the largest magnitude; patterns of magnitudes are ordered as they are, NaN above infinity.
  __aicore__ inline int32_t Largest(const LocalTensor<float>& x, int32_t count, int32_t width) {
    const LocalTensor<float> t = Room(0);
    Pad(t, count, width);
    Abs(t, x, count);
    PipeBarrier<PIPE_V>();
    const LocalTensor<int32_t> patterns = t.ReinterpretCast<int32_t>();
    for (int32_t half = width / 2; half >= kLanes; half /= 2) {
      Max(patterns, patterns, patterns[half], half);
      PipeBarrier<PIPE_V>();
    }
    Await();
    int32_t most = 0;
    for (int32_t i = 0; i < kLanes; ++i) {
      const int32_t pattern = patterns.GetValue(i);
      if (pattern > most) most = pattern;
    }
    Release();
    return most;
  }

  // Counts what is not finite: its pattern less infinity's is not negative.
  __aicore__ inline void Spoil(const LocalTensor<float>& x, int32_t count, int32_t width, int32_t most) {
    const LocalTensor<float> t = Room(0);
    const LocalTensor<int32_t> patterns = t.ReinterpretCast<int32_t>();
    Pad(t, count, width);
    Abs(t, x, count);
    PipeBarrier<PIPE_V>();
    Adds(patterns, patterns, -kInfinity, width);
    PipeBarrier<PIPE_V>();
    ShiftRight(patterns, patterns, 31, width);
    PipeBarrier<PIPE_V>();
    for (int32_t half = width / 2; half >= kLanes; half /= 2) {
      Add(patterns, patterns, patterns[half], half);
      PipeBarrier<PIPE_V>();
    }
    Await();
    sum_.bad += width;
    for (int32_t i = 0; i < kLanes; ++i) sum_.bad += patterns.GetValue(i);
    Release();
    if (most > kInfinity) sum_.nans += 1;
  }

  __aicore__ inline void Square(const LocalTensor<float>& x, int32_t count, int32_t width, int32_t most) {
    // The scale is 2^(20 - exponent of the largest), as far as f32 goes.
    int32_t field = 127 + 20 + 127 - (most >> 23);
    if (field > 254) field = 254;
    const Bits scale = {static_cast<uint32_t>(field) << 23};
    LocalTensor<float> low = Room(0), high = Room(1), square = Room(2), rest = Room(3);
    Pad(low, count, width);
    Muls(low, x, scale.value, count);
    PipeBarrier<PIPE_V>();
    if (head_->x_dtype != kF32) {  // 8 or 11 bits of mantissa: squares are exact
      Mul(rest, low, low, width);
      PipeBarrier<PIPE_V>();
      Duplicate(low, 0.0f, width);
      PipeBarrier<PIPE_V>();
      AddUp(rest, low, high, square, width, 2 * (127 - field));
      return;
    }
    const LocalTensor<uint32_t> bits = high.ReinterpretCast<uint32_t>();
    ShiftRight(bits, low.ReinterpretCast<uint32_t>(), 12u, width);
    PipeBarrier<PIPE_V>();
    ShiftLeft(bits, bits, 12u, width);
    PipeBarrier<PIPE_V>();
    Sub(low, low, high, width);
    Mul(square, high, high, width);
    PipeBarrier<PIPE_V>();
    Mul(rest, high, low, width);
    PipeBarrier<PIPE_V>();
    Add(rest, rest, rest, width);
    Mul(low, low, low, width);
    PipeBarrier<PIPE_V>();
    // rest + low, then square + that: the larger first, so that what a sum loses is a difference.
    Add(high, rest, low, width);
    PipeBarrier<PIPE_V>();
    Sub(rest, high, rest, width);
    PipeBarrier<PIPE_V>();
    Sub(low, low, rest, width);
    PipeBarrier<PIPE_V>();
    Add(rest, square, high, width);
    PipeBarrier<PIPE_V>();
    Sub(square, rest, square, width);
    PipeBarrier<PIPE_V>();
    Sub(high, high, square, width);
    PipeBarrier<PIPE_V>();
    Add(low, low, high, width);
    PipeBarrier<PIPE_V>();
    AddUp(rest, low, high, square, width, 2 * (127 - field));
  }

  // The sum of pairs s + c, by halves; t and z are room. Its unit is 2^exponent.
  __aicore__ inline void AddUp(LocalTensor<float> s, const LocalTensor<float>& c, LocalTensor<float> t,
                               const LocalTensor<float>& z, int32_t width, int32_t exponent) {
    for (int32_t half = width / 2; half >= kLanes; half /= 2) {
      Add(t, s, s[half], half);
      Add(c, c, c[half], half);
      PipeBarrier<PIPE_V>();
      Sub(z, t, s, half);
      PipeBarrier<PIPE_V>();
      Sub(z[half], t, z, half);
      PipeBarrier<PIPE_V>();
      Sub(z[half], s, z[half], half);
      Sub(z, s[half], z, half);
      PipeBarrier<PIPE_V>();
      Add(z, z, z[half], half);
      PipeBarrier<PIPE_V>();
      Add(c, c, z, half);
      PipeBarrier<PIPE_V>();
      const LocalTensor<float> sums = t;
      t = s;
      s = sums;
    }
    Await();
    const LocalTensor<uint32_t> high = s.ReinterpretCast<uint32_t>(), low = c.ReinterpretCast<uint32_t>();
    for (int32_t i = 0; i < kLanes; ++i) {
      AddPattern(sum_, high.GetValue(i), exponent);
      AddPattern(sum_, low.GetValue(i), exponent);
    }
    Release();
  }

  // The scalar unit reads what vectors computed; vectors write there again.
  __aicore__ inline void Await() {
    SetFlag<HardEvent::V_S>(computed_);
    WaitFlag<HardEvent::V_S>(computed_);
  }
  __aicore__ inline void Release() {
    SetFlag<HardEvent::S_V>(read_);
    WaitFlag<HardEvent::S_V>(read_);
  }

  __gm__ const NormHead* head_;
  int64_t at_, end_;
  float scale_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> room_, words_;
  TEventID computed_, read_, written_;
  ExactSum sum_;
};

__aicore__ inline void RunNorm(GM_ADDR table) {
  Norm norm(table);
  norm.Run();
}

// Adds what the cores of npuzero_norm left in the workspace; by one core, after them.
__aicore__ inline void RunNormFinish(GM_ADDR table) {
  __gm__ const NormHead* head = reinterpret_cast<__gm__ const NormHead*>(table);
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer, words;
  const int32_t cores = head->head.cores;
  pipe.InitBuffer(buffer, cores * kNormBytes);
  pipe.InitBuffer(words, kBlockBytes);
  const TEventID loaded = pipe.AllocEventID<HardEvent::MTE2_S>(), written = pipe.AllocEventID<HardEvent::S_MTE3>();
  const LocalTensor<uint32_t> sums = buffer.Get<uint32_t>();
  for (int32_t core = 0; core < cores; ++core) {
    npu::Load(buffer.Get<uint8_t>()[core * kNormBytes], head->workspace + core * kNormBytes, 8 * (kDigits + 2));
  }
  SetFlag<HardEvent::MTE2_S>(loaded);
  WaitFlag<HardEvent::MTE2_S>(loaded);
  ExactSum total;
  Clear(total);
  for (int32_t core = 0; core < cores; ++core) {
    const LocalTensor<uint32_t> its = sums[core * kNormBytes / 4];
    for (int32_t i = 0; i < kDigits; ++i) total.digits[i] += static_cast<int64_t>(npu::GetLong(its, i));
    total.bad += static_cast<int64_t>(npu::GetLong(its, kDigits));
    total.nans += static_cast<int64_t>(npu::GetLong(its, kDigits + 1));
  }
  npu::StoreResult(head->out, total, words.Get<uint8_t>(), written);
}

}  // namespace npu
}  // namespace npuzero

NPUZERO_KERNEL(npuzero_norm, RunNorm)
NPUZERO_KERNEL(npuzero_norm_finish, RunNormFinish)
