// The contract is in ops/norm.h; the vector unit has no float64, so squares and their sums are pairs of floats here.
//
// A block's squares are taken without error (Dekker: "A floating-point technique for extending the available
// precision", 1971: halves of 12 bits, whose products are exact), and added up by pairs, the larger one first: so three
// operations give a sum and what it lost. 8 rows become one, that is added to a running row; at the end of a block the
// row's lanes become few. These are added exactly, as integers of many digits. So the result depends on the blocks
// alone, not on how cores share them; a block's sum is within 2^-40.
//
// Where a square is too large or too small for f32, or something is not finite, the block is read again, and scaled by
// a power of two that brings its largest magnitude to 2^20.
#include "npu/exact_sum.h"
#include "npu/walk.h"

namespace npuzero {
namespace npu {

constexpr int32_t kLanes = 1024;  // of a row
constexpr int32_t kRows = 4;      // of a chunk
constexpr int32_t kChunk = kRows * kLanes;
constexpr int32_t kFew = 16;              // lanes that the scalar unit adds
constexpr int32_t kEndLevels = 6;         // from a row to those
constexpr int32_t kHalf = 64;             // floats: half of UB's 16 groups of banks
constexpr int32_t kRow = kLanes + kHalf;  // from one row to the next, so that neighbours are read from different groups
constexpr int32_t kLeastSum = 39 << 23;   // the pattern of 2^-88; below it denormals may be missing
constexpr int32_t kUpper = static_cast<int32_t>(0xfffff000);  // bits of a pattern whose squares are exact

// An f32 and its pattern.
union Bits {
  uint32_t pattern;
  float value;
};

// Where a level of the tree has a pair of rows, a and b, and leaves what comes of them: their sum, and what was lost.
// carry_a and carry_b are what a and b lost before; their sum goes where one of them was.
struct Pair {
  LocalTensor<float> a, b, sum, larger, smaller, carry_a, carry_b, carries, lost;
  int32_t lanes;
  bool carried;
};

class Norm {
 public:
  __aicore__ inline explicit Norm(GM_ADDR table) {
    head_ = reinterpret_cast<__gm__ const NormHead*>(table);
    __gm__ const Share* share = reinterpret_cast<__gm__ const Share*>(table + sizeof(NormHead)) + GetBlockIdx();
    begin_ = share->begin;
    end_ = share->end;
    addend_scale_ = head_->scale;
    narrow_ = head_->x_dtype != kF32;
    chunks_ = head_->addend != 0 ? 1 : 2;
    area_ = chunks_ * kRows * kRow;
    beside_ = RoundUp(4 * (area_ + kHalf), 512);
    pipe_.InitBuffer(in_, 2, narrow_ ? 2 * chunks_ * kChunk : beside_ + (head_->addend != 0 ? 4 * kChunk : 0));
    if (head_->addend != 0) pipe_.InitBuffer(out_, 2, 4 * kChunk);
    pipe_.InitBuffer(room_, 4 * (3 * area_ + 2 * kHalf + (chunks_ == 1 ? 5 : 3) * kLanes));
    computed_ = pipe_.AllocEventID<HardEvent::V_S>();
    read_ = pipe_.AllocEventID<HardEvent::S_V>();
    written_ = pipe_.AllocEventID<HardEvent::S_MTE3>();
    stored_ = pipe_.AllocEventID<HardEvent::MTE3_MTE2>();
    Clear(sum_);
    Duplicate(Mask().ReinterpretCast<int32_t>(), kUpper, kLanes);
  }

  __aicore__ inline void Run() {
    for (int64_t at = begin_; at < end_; at += kNormBlock) {
      const int32_t count = static_cast<int32_t>(end_ - at < kNormBlock ? end_ - at : kNormBlock);
      Sum(at, count, 1.0f, head_->addend != 0);
      if (!TakeSum(0)) SumScaled(at, count);
    }
    const LocalTensor<uint8_t> room = room_.Get<uint8_t>();
    if (GetBlockNum() == 1) {
      npu::StoreResult(head_->out, sum_, room, written_);
      return;
    }
    const LocalTensor<uint32_t> words = room.ReinterpretCast<uint32_t>();
    for (int32_t i = 0; i < kDigits; ++i) npu::SetLong(words, i, static_cast<uint64_t>(sum_.digits[i]));
    npu::SetLong(words, kDigits, static_cast<uint64_t>(sum_.bad));
    npu::SetLong(words, kDigits + 1, static_cast<uint64_t>(sum_.nans));
    npu::StoreWords(head_->workspace + GetBlockIdx() * kNormBytes, room, 8 * (kDigits + 2), written_);
  }

 private:
  // Three areas of rows; a row for the mask, that begins in the other half of the groups of banks than x does; the
  // running sum and what it lost, a row each; the same of a chunk.
  __aicore__ inline LocalTensor<float> Area(int32_t i) { return room_.Get<float>()[i * area_]; }
  __aicore__ inline LocalTensor<float> Mask() { return room_.Get<float>()[3 * area_ + kHalf]; }
  __aicore__ inline LocalTensor<float> Running() { return room_.Get<float>()[3 * area_ + 2 * kHalf + kLanes]; }
  __aicore__ inline LocalTensor<float> Lost() { return Running()[kLanes]; }
  __aicore__ inline LocalTensor<float> Kept() { return Running()[2 * kLanes]; }
  __aicore__ inline LocalTensor<float> KeptLost() { return Running()[3 * kLanes]; }

  // The sum of a block's squares, scaled, into the running row; `adds`: with the addend, in place and back to GM.
  __aicore__ inline void Sum(int64_t begin, int32_t count, float scale, bool adds) {
    Duplicate(Running(), 0.0f, 2 * kLanes);
    PipeBarrier<PIPE_V>();
    const int32_t tile = chunks_ * kChunk;
    LoadTile(begin, Least(tile, count), adds);
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    for (int32_t at = 0; at < count; at += tile) {
      const bool more = at + tile < count;
      if (more) LoadTile(begin + at + tile, Least(tile, count - at - tile), adds);
      // Where a tile is one chunk, the first of a pair is kept for the second.
      const bool second = chunks_ == 1 && at % (2 * kChunk) != 0;
      keeps_ = chunks_ == 1 && !second && more;
      held_ = (Least(tile, count - at) + kChunk - 1) / kChunk;
      joins_ = second || held_ == 2;
      AddTile(in, begin + at, Least(tile, count - at), scale, adds);
      in_.FreeTensor(in);
      // What is waited for is waited for before the tree's last step, which the next tile's first one can go with.
      if (more) in = in_.DeQue<uint8_t>();
      KeepLost(Levels() - 1);
    }
    Finish();
  }

  __aicore__ inline int32_t Least(int32_t a, int32_t b) { return a < b ? a : b; }

  __aicore__ inline void LoadTile(int64_t at, int32_t count, bool adds) {
    LocalTensor<uint8_t> in = in_.AllocTensor<uint8_t>();
    const int32_t size = ItemSize(head_->x_dtype);
    npu::Load(in, head_->x + at * size, count * size);
    if (adds) {
      const int32_t other = ItemSize(head_->addend_dtype);
      npu::Load(in[beside_], head_->addend + at * other, count * other);
    }
    in_.EnQue(in);
  }

  __aicore__ inline void AddTile(const LocalTensor<uint8_t>& in, int64_t at, int32_t count, float scale, bool adds) {
    const LocalTensor<float> x = in.ReinterpretCast<float>();
    if (narrow_) {
      SquareNarrow(in, count, scale);
      larger_ = Area(2)[kHalf];
    } else {
      if (adds) Accumulate(x, in[beside_], at, count);
      Square(x, count, scale);
      larger_ = x[kHalf];
    }
    AddUp();
  }

  // The running row's lanes to few; before that what squares lost is taken in again, so that it stays small.
  __aicore__ inline void Finish() {
    PipeBarrier<PIPE_V>();
    if (!narrow_) {
      const LocalTensor<float> sum = Area(0), taken = Area(1)[kHalf];
      Add(sum, Running(), Lost(), kLanes);
      PipeBarrier<PIPE_V>();
      Sub(taken, sum, Running(), kLanes);
      PipeBarrier<PIPE_V>();
      Sub(Lost(), Lost(), taken, kLanes);
      Adds(Running(), sum, 0.0f, kLanes);
      PipeBarrier<PIPE_V>();
    }
    larger_ = Area(2)[kHalf];
    ending_ = true;
    AddUp();
    KeepLost(Levels() - 1);
    ending_ = false;
  }

  // x = x + f32(addend) * scale, in place and back to GM.
  __aicore__ inline void Accumulate(const LocalTensor<float>& x, const LocalTensor<uint8_t>& addend, int64_t at,
                                    int32_t count) {
    const LocalTensor<float> t = Area(0)[kHalf];
    if (head_->addend_dtype == kF32) {
      Muls(t, addend.ReinterpretCast<float>(), addend_scale_, count);
    } else {
      npu::Widen(t, addend, head_->addend_dtype, count);
      PipeBarrier<PIPE_V>();
      Muls(t, t, addend_scale_, count);
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

  // Squares of bf16 and f16, which are exact, as rows in area 0. What a row does not have is zeros.
  __aicore__ inline void SquareNarrow(const LocalTensor<uint8_t>& in, int32_t count, float scale) {
    const LocalTensor<float> squares = Area(0);
    const int32_t rows = held_ * kRows;
    if (count < rows * kLanes) {
      Duplicate(squares, 0.0f, rows * kRow);
      PipeBarrier<PIPE_V>();
    }
    for (int32_t i = 0; i * kLanes < count; ++i) {
      npu::Widen(squares[i * kRow], in[i * kLanes * 2], head_->x_dtype, Least(kLanes, count - i * kLanes));
    }
    PipeBarrier<PIPE_V>();
    if (scale != 1.0f) {
      Muls(squares, squares, scale, rows * kRow);
      PipeBarrier<PIPE_V>();
    }
    for (int32_t i = 0; i < rows; ++i) Mul(squares[i * kRow], squares[i * kRow], squares[i * kRow], kLanes);
    PipeBarrier<PIPE_V>();
  }

  // Squares of f32 as rows in area 0, and what they lost as rows in area 2. x begins a period of the groups of banks.
  __aicore__ inline void Square(const LocalTensor<float>& x, int32_t count, float scale) {
    const int32_t width = held_ * kChunk, rows = held_ * kRows;
    const LocalTensor<float> squares = Area(0), upper = Area(0)[kHalf], product = Area(1)[kHalf], rest = Area(2);
    if (count < width) {
      Duplicate(upper, 0.0f, width);
      PipeBarrier<PIPE_V>();
      npu::Copy(upper.ReinterpretCast<uint8_t>(), x.ReinterpretCast<uint8_t>(), 4 * count);
      PipeBarrier<PIPE_V>();
      npu::Copy(x.ReinterpretCast<uint8_t>(), upper.ReinterpretCast<uint8_t>(), 4 * width);
      PipeBarrier<PIPE_V>();
    }
    if (scale != 1.0f) {
      Muls(x, x, scale, width);
      PipeBarrier<PIPE_V>();
    }
    // x = u + l: then u * u, 2 u * l and l * l are exact.
    for (int32_t i = 0; i < width; i += kLanes) {
      And(upper[i].ReinterpretCast<uint16_t>(), x[i].ReinterpretCast<uint16_t>(), Mask().ReinterpretCast<uint16_t>(),
          2 * kLanes);
    }
    PipeBarrier<PIPE_V>();
    Sub(x, x, upper, width);
    Muls(product, upper, 2.0f, width);
    Mul(rest, upper, upper, width);
    PipeBarrier<PIPE_V>();
    Mul(product, product, x, width);
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < rows; ++i) Add(squares[i * kRow], rest[i * kLanes], product[i * kLanes], kLanes);
    Mul(x, x, x, width);
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < rows; ++i) Sub(rest[i * kLanes], squares[i * kRow], rest[i * kLanes], kLanes);
    PipeBarrier<PIPE_V>();
    Sub(product, product, rest, width);
    PipeBarrier<PIPE_V>();
    for (int32_t i = 0; i < rows; ++i) Add(rest[i * kRow], product[i * kLanes], x[i * kLanes], kLanes);
    PipeBarrier<PIPE_V>();
  }

  // The tree over the rows of a tile, level by level: pairs of rows twice, to a row for each chunk; the rows of a pair
  // of chunks; then what there is to the running row. Sums and the larger and smaller of a pair lie in rows of the same
  // number, the larger ones in the other half of the groups of banks than the rest; no two levels in work have one.
  // Or, at the end, the tree over the running row.
  __aicore__ inline int32_t Levels() { return ending_ ? kEndLevels : (keeps_ ? 2 : (joins_ ? 4 : 3)); }
  __aicore__ inline int32_t Pairs(int32_t level) {
    return ending_ || level >= 2 ? 1 : (level == 0 ? 2 * held_ : held_);
  }
  __aicore__ inline Pair PairOf(int32_t level, int32_t i) {
    const LocalTensor<float> sums = Area(0), smaller = Area(1), rest = Area(2);
    const int32_t chunk = 2 * chunks_, both = kRows * chunks_ - 1;  // the rows of a chunk and of a pair of them
    Pair pair;
    pair.lanes = kLanes;
    pair.carried = level > 0 || !narrow_ || ending_;
    int32_t row = i;
    if (ending_) {
      row = level % kRows;
      pair.lanes = kLanes >> (level + 1);
      pair.a = pair.sum = Running();
      pair.b = Running()[pair.lanes];
      pair.carry_a = pair.carries = pair.lost = Lost();
      pair.carry_b = Lost()[pair.lanes];
    } else if (level == Levels() - 1 && !keeps_) {
      const int32_t from = joins_ ? both : chunk;
      row = !joins_ ? both : (chunks_ == 1 ? 0 : both - 1);
      pair.a = pair.sum = Running();
      pair.b = sums[from * kRow];
      pair.carry_a = pair.lost = Lost();
      pair.carry_b = pair.carries = smaller[from * kRow];
    } else {
      if (level > 0) row = level == 1 ? chunk + i : both;
      const int32_t first = level == 2 ? chunk : 2 * i, second = level == 2 && chunks_ == 1 ? chunk : first + 1;
      const LocalTensor<float> carries = level == 0 ? rest : smaller;
      const bool kept = level == 2 && chunks_ == 1, keeps = level == 1 && keeps_;
      pair.a = kept ? Kept() : sums[first * kRow];
      pair.b = sums[second * kRow];
      pair.carry_a = kept ? KeptLost() : carries[first * kRow];
      pair.carry_b = carries[second * kRow];
      pair.carries = row % 2 == 0 ? pair.carry_b : pair.carry_a;
      pair.sum = keeps ? Kept() : sums[row * kRow];
      pair.lost = keeps ? KeptLost() : smaller[row * kRow];
    }
    pair.larger = larger_[row * kRow];
    pair.smaller = smaller[row * kRow];
    return pair;
  }

  // sum = a + b, and lost = what that lost + what a and b had lost. Three levels are in work at a time, each two steps
  // behind the one below, since vector instructions that wait for one another are slow. KeepLost of the last level is
  // left.
  __aicore__ inline void AddUp() {
    const int32_t levels = Levels();
    for (int32_t level = 0; level <= levels; ++level) {
      if (level < levels) Sort(level);
      if (level >= 1) TakeAway(level - 1);
      if (level >= 2) KeepLost(level - 2);
      PipeBarrier<PIPE_V>();
      if (level < levels) SumUp(level);
      if (level >= 1) FindLost(level - 1);
      PipeBarrier<PIPE_V>();
    }
  }
  __aicore__ inline void Sort(int32_t level) {
    for (int32_t i = 0; i < Pairs(level); ++i) {
      const Pair pair = PairOf(level, i);
      const LocalTensor<int32_t> a = pair.a.ReinterpretCast<int32_t>(), b = pair.b.ReinterpretCast<int32_t>();
      Max(pair.larger.ReinterpretCast<int32_t>(), a, b, pair.lanes);
      Min(pair.smaller.ReinterpretCast<int32_t>(), a, b, pair.lanes);
    }
  }
  __aicore__ inline void SumUp(int32_t level) {
    for (int32_t i = 0; i < Pairs(level); ++i) {
      const Pair pair = PairOf(level, i);
      Add(pair.sum, pair.larger, pair.smaller, pair.lanes);
    }
  }
  __aicore__ inline void TakeAway(int32_t level) {
    for (int32_t i = 0; i < Pairs(level); ++i) {
      const Pair pair = PairOf(level, i);
      Sub(pair.larger, pair.sum, pair.larger, pair.lanes);
    }
  }
  __aicore__ inline void FindLost(int32_t level) {
    for (int32_t i = 0; i < Pairs(level); ++i) {
      const Pair pair = PairOf(level, i);
      Sub(pair.smaller, pair.smaller, pair.larger, pair.lanes);
      if (pair.carried) Add(pair.carries, pair.carry_a, pair.carry_b, pair.lanes);
    }
  }
  __aicore__ inline void KeepLost(int32_t level) {
    for (int32_t i = 0; i < Pairs(level); ++i) {
      const Pair pair = PairOf(level, i);
      if (pair.carried) Add(pair.lost, pair.carries, pair.smaller, pair.lanes);
    }
  }

  // Adds the few lanes that are left, in units of 2^exponent, where they are what they should be.
  __aicore__ inline bool TakeSum(int32_t exponent) {
    const LocalTensor<uint32_t> sums = Running().ReinterpretCast<uint32_t>(), lost = Lost().ReinterpretCast<uint32_t>();
    uint32_t high[kFew], low[kFew], most = 0;
    bool finite = true;
    Await();
    for (int32_t i = 0; i < kFew; ++i) {
      high[i] = sums.GetValue(i);
      low[i] = lost.GetValue(i);
      if (high[i] > most) most = high[i];
      finite = finite && (high[i] & kInfinity) != kInfinity && (low[i] & kInfinity) != kInfinity;
    }
    Release();
    if (!finite || most < kLeastSum) return false;
    for (int32_t i = 0; i < kFew; ++i) {
      AddPattern(sum_, high[i], exponent);
      AddPattern(sum_, low[i], exponent);
    }
    return true;
  }

  // The same for a block that needs it; its elements are in GM as they are to be.
  __aicore__ inline void SumScaled(int64_t begin, int32_t count) {
    if (head_->addend != 0) {
      SetFlag<HardEvent::MTE3_MTE2>(stored_);
      WaitFlag<HardEvent::MTE3_MTE2>(stored_);
    }
    int32_t most = 0;
    for (int32_t at = 0; at < count; at += kChunk) {
      const int32_t here = Look(begin + at, Least(kChunk, count - at));
      if (here > most) most = here;
    }
    if (most == 0 || most >= kInfinity) return;
    // The scale is 2^(20 - exponent of the largest), as far as f32 goes.
    const int32_t field = Least(127 + 20 + 127 - (most >> 23), 254);
    const Bits scale = {static_cast<uint32_t>(field) << 23};
    Sum(begin, count, scale.value, false);
    TakeSum(2 * (127 - field));
  }

  // The pattern of the largest magnitude of a chunk; counts what is not finite.
  __aicore__ inline int32_t Look(int64_t at, int32_t count) {
    LoadTile(at, count, false);
    LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
    LocalTensor<float> x = in.ReinterpretCast<float>();
    if (narrow_) {
      x = Area(1);
      npu::Widen(x, in, head_->x_dtype, count);
    }
    const int32_t most = Largest(x, count);
    if (most >= kInfinity) Spoil(x, count, most);
    in_.FreeTensor(in);
    return most;
  }

  // The patterns of a chunk's magnitudes, which are ordered as they are, NaN above infinity; zeros beyond `count`.
  __aicore__ inline LocalTensor<int32_t> Magnitudes(const LocalTensor<float>& x, int32_t count) {
    const LocalTensor<float> t = Area(0);
    Duplicate(t, 0.0f, kChunk);
    PipeBarrier<PIPE_V>();
    Abs(t, x, count);
    PipeBarrier<PIPE_V>();
    return t.ReinterpretCast<int32_t>();
  }

  __aicore__ inline int32_t Largest(const LocalTensor<float>& x, int32_t count) {
    const LocalTensor<int32_t> patterns = Magnitudes(x, count);
    for (int32_t half = kChunk / 2; half >= kFew; half /= 2) {
      Max(patterns, patterns, patterns[half], half);
      PipeBarrier<PIPE_V>();
    }
    Await();
    int32_t most = 0;
    for (int32_t i = 0; i < kFew; ++i) {
      const int32_t pattern = patterns.GetValue(i);
      if (pattern > most) most = pattern;
    }
    Release();
    return most;
  }

  // Counts what is not finite: its pattern less infinity's is not negative.
  __aicore__ inline void Spoil(const LocalTensor<float>& x, int32_t count, int32_t most) {
    const LocalTensor<int32_t> patterns = Magnitudes(x, count);
    Adds(patterns, patterns, -kInfinity, kChunk);
    PipeBarrier<PIPE_V>();
    ShiftRight(patterns, patterns, 31, kChunk);
    PipeBarrier<PIPE_V>();
    for (int32_t half = kChunk / 2; half >= kFew; half /= 2) {
      Add(patterns, patterns, patterns[half], half);
      PipeBarrier<PIPE_V>();
    }
    Await();
    sum_.bad += kChunk;
    for (int32_t i = 0; i < kFew; ++i) sum_.bad += patterns.GetValue(i);
    Release();
    if (most > kInfinity) sum_.nans += 1;
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
  int64_t begin_, end_;
  float addend_scale_;
  bool narrow_, keeps_ = false, joins_ = false, ending_ = false;
  int32_t chunks_, area_, beside_;  // of a tile; floats of an area; bytes of UB from x to its addend
  int32_t held_ = 0;                // chunks of the tile in work
  LocalTensor<float> larger_;       // rows, beside those of the areas
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> room_;
  TEventID computed_, read_, written_, stored_;
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
