// What every kernel does around its arithmetic: find its share in the table, walk the tiles, move them. Device code:
// the subset of C++ that the device compiler has.
//
// Namespace AscendC has names that we do not know of (Sum, Round, Copy, Select, ..., more with every release), and a
// call with a tensor looks there too. So all that is ours is in namespace npuzero::npu, and a function of ours that
// takes something of AscendC's is a member, or is called with its namespace: npu::Load.
#pragma once

#include "kernel_operator.h"
#include "npu/table.h"

// The kernel `name`, which is npuzero::npu::run on vector cores alone. That is said, since of a unit with several
// kernels it is not found out, and on cube cores, or twice as many, they would run past their shares: by __vector__
// where the compiler launches kernels (bisheng, CANN 9.0 on; CMakeLists.txt says so), before that in the body.
#ifdef NPUZERO_BISHENG
#define NPUZERO_KERNEL(name, run) \
  extern "C" __global__ __vector__ __aicore__ void name(GM_ADDR table) { npuzero::npu::run(table); }
#else
#define NPUZERO_KERNEL(name, run)                             \
  extern "C" __global__ __aicore__ void name(GM_ADDR table) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);           \
    npuzero::npu::run(table);                                 \
  }
#endif

namespace npuzero {
namespace npu {

using namespace AscendC;

constexpr int32_t kBlockBytes = 32;  // of UB
// An instruction of two sources takes two cycles for a repeat where they meet in a group of UB's banks: 16 groups of
// 32-byte rows. Sources that many bytes out of step (of 512) do not meet, as a repeat takes 256 bytes of each.
constexpr int32_t kSkew = 256;
constexpr float kLargest = 3.4028234663852886e38f;
constexpr int32_t kInfinity = 0x7f800000;  // its pattern
constexpr int32_t kRepeat = 64;            // f32 lanes of one repeat; Compare takes whole repeats alone

__aicore__ inline int32_t RoundUp(int32_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
__aicore__ inline int32_t ItemSize(int32_t dtype) { return dtype == kF32 ? 4 : (dtype == kU8 ? 1 : 2); }

// The tables that follow a head.
template <class TableHead, class Row>
__aicore__ inline __gm__ const Row* RowsOf(GM_ADDR table) {
  const int64_t cores = reinterpret_cast<__gm__ const Head*>(table)->cores;
  return reinterpret_cast<__gm__ const Row*>(table + sizeof(TableHead) + cores * sizeof(Share));
}

// The tiles of this core's share, one after the other.
template <class TableHead, class Row>
class Tiles {
 public:
  __aicore__ inline explicit Tiles(GM_ADDR table) {
    __gm__ const Share* share = reinterpret_cast<__gm__ const Share*>(table + sizeof(TableHead)) + GetBlockIdx();
    rows_ = RowsOf<TableHead, Row>(table);
    place_ = share->begin;
    end_ = share->end;
    part_ = share->part;
  }

  // Moves to the next tile; false at the end.
  __aicore__ inline bool Next() {
    if (place_ >= end_) return false;
    while (place_ >= rows_[part_].piece.line + rows_[part_].piece.count) ++part_;
    row = rows_ + part_;
    at = place_ - row->piece.line;
    const int64_t left = (row->piece.count < end_ - row->piece.line ? row->piece.count : end_ - row->piece.line) - at;
    const int64_t full = row->piece.tile - ((at - row->piece.lead) & (kGrain - 1));
    count = static_cast<int32_t>(left < full ? left : full);
    place_ += count;
    return true;
  }

  __gm__ const Row* row;
  int64_t at;     // of the tile's first element in its part
  int32_t count;  // elements

 private:
  __gm__ const Row* rows_;
  int64_t place_, end_, part_;
};

// Bytes between GM and UB; a tail that fills no block goes by DataCopyPad.
__aicore__ inline void Load(const LocalTensor<uint8_t>& to, uint64_t from, int64_t bytes) {
  GlobalTensor<uint8_t> source;
  source.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from), bytes);
  if (bytes % kBlockBytes == 0) {
    DataCopy(to, source, static_cast<uint32_t>(bytes));
  } else {
    DataCopyPad(to, source, DataCopyExtParams(1, static_cast<uint32_t>(bytes), 0, 0, 0),
                DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
  }
}

__aicore__ inline void Store(uint64_t to, const LocalTensor<uint8_t>& from, int64_t bytes) {
  GlobalTensor<uint8_t> target;
  target.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to), bytes);
  if (bytes % kBlockBytes == 0) {
    DataCopy(target, from, static_cast<uint32_t>(bytes));
  } else {
    DataCopyPad(target, from, DataCopyExtParams(1, static_cast<uint32_t>(bytes), 0, 0, 0));
  }
}

// A number that lies on the device, or another where there is none.
__aicore__ inline float ScalarAt(uint64_t address, float otherwise) {
  if (address == 0) return otherwise;
  GlobalTensor<float> scalar;
  scalar.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(address), 1);
  return scalar.GetValue(0);
}

// --- conversions; the vector unit knows bf16 and f16 only as sources and targets of Cast
// -------------------------------

__aicore__ inline void Widen(const LocalTensor<float>& to, const LocalTensor<uint8_t>& from, int32_t dtype,
                             int32_t count) {
  if (dtype == kBF16) {
    Cast(to, from.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, count);
  } else {
    Cast(to, from.ReinterpretCast<half>(), RoundMode::CAST_NONE, count);
  }
}

// Of f32 to bf16 or f16, ties to even unless said otherwise.
__aicore__ inline void Round(const LocalTensor<uint8_t>& to, const LocalTensor<float>& from, int32_t dtype,
                             int32_t count, RoundMode bf16 = RoundMode::CAST_RINT) {
  if (dtype == kBF16) {
    Cast(to.ReinterpretCast<bfloat16_t>(), from, bf16, count);
  } else {
    Cast(to.ReinterpretCast<half>(), from, RoundMode::CAST_RINT, count);
  }
}

// Bytes of UB, an even number of them.
__aicore__ inline void Copy(const LocalTensor<uint8_t>& to, const LocalTensor<uint8_t>& from, int32_t bytes) {
  Adds(to.ReinterpretCast<int16_t>(), from.ReinterpretCast<int16_t>(), static_cast<int16_t>(0), bytes / 2);
}

// to = round(f32(from)); equal dtypes copy the bits. `wide` is room for count floats, used between bf16 and f16.
__aicore__ inline void Convert(const LocalTensor<uint8_t>& to, int32_t to_dtype, const LocalTensor<uint8_t>& from,
                               int32_t from_dtype, const LocalTensor<float>& wide, int32_t count) {
  if (from_dtype == to_dtype) {
    npu::Copy(to, from, count * ItemSize(from_dtype));
  } else if (from_dtype == kF32) {
    npu::Round(to, from.ReinterpretCast<float>(), to_dtype, count);
  } else if (to_dtype == kF32) {
    npu::Widen(to.ReinterpretCast<float>(), from, from_dtype, count);
  } else {
    npu::Widen(wide, from, from_dtype, count);
    PipeBarrier<PIPE_V>();
    npu::Round(to, wide, to_dtype, count);
  }
}

}  // namespace npu
}  // namespace npuzero
