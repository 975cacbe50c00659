// The names of Ascend C that the kernels of csrc/npu use, for a compiler of the host: written from the documented API
// (names, signatures, tables), with an implementation of its own (machine.cpp) that runs them and checks what the
// device would not. What is missing here does not compile.
#pragma once

#include "machine.h"

// What the device's compiler knows by itself; a test has it otherwise.
#ifndef __gm__
#define __aicore__
#define __global__
#define __vector__
#define __gm__
#endif

using GM_ADDR = __gm__ uint8_t*;

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_AICORE };
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(type == KERNEL_TYPE_AIV_ONLY, "this is one vector core")

struct half {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};

namespace AscendC {

// Two to a byte, the first in its lower half. A tensor of it is one of bytes by another name, of which the documented
// examples take no element.
struct int4b_t {
  uint8_t bits;
};

enum class TPosition { GM, VECIN, VECOUT, VECCALC };
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class HardEvent { MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2, V_S, S_V, S_MTE2, MTE2_S, S_MTE3, MTE3_S };
enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
using TEventID = int8_t;

namespace detail {
using namespace emulator;

template <class T>
struct type_of;
template <>
struct type_of<float> {
  static constexpr Type value = Type::f32;
};
template <>
struct type_of<bfloat16_t> {
  static constexpr Type value = Type::bf16;
};
template <>
struct type_of<half> {
  static constexpr Type value = Type::f16;
};
template <>
struct type_of<int32_t> {
  static constexpr Type value = Type::i32;
};
template <>
struct type_of<uint32_t> {
  static constexpr Type value = Type::u32;
};
template <>
struct type_of<int16_t> {
  static constexpr Type value = Type::i16;
};
template <>
struct type_of<uint16_t> {
  static constexpr Type value = Type::u16;
};
template <>
struct type_of<uint8_t> {
  static constexpr Type value = Type::u8;
};
template <>
struct type_of<int8_t> {
  static constexpr Type value = Type::i8;
};
template <>
struct type_of<int4b_t> {
  static constexpr Type value = Type::i4;
};

constexpr Pipe from(HardEvent event) {
  constexpr Pipe ends[] = {MTE2, V, V, MTE3, MTE2, MTE3, V, S, S, MTE2, S, MTE3};
  return ends[static_cast<int>(event)];
}
constexpr Pipe to(HardEvent event) {
  constexpr Pipe ends[] = {V, MTE2, MTE3, V, MTE3, MTE2, S, V, MTE2, S, MTE3, S};
  return ends[static_cast<int>(event)];
}
}  // namespace detail

#define SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()
#define HERE \
  emulator::Site { file, line }

template <typename T>
class LocalTensor {
 public:
  LocalTensor operator[](uint32_t offset) const {
    static_assert(detail::type_of<T>::value != emulator::Type::i4, "an element is half a byte");
    const int32_t skip = static_cast<int32_t>(offset * sizeof(T));
    return LocalTensor({span.at + skip, span.bytes - skip});
  }
  template <typename Cast>
  LocalTensor<Cast> ReinterpretCast() const {
    return LocalTensor<Cast>(span);
  }
  T GetValue(uint32_t offset, SITE) const {
    T value;
    emulator::read_local(HERE, (*this)[offset].operand(), &value);
    return value;
  }
  void SetValue(uint32_t offset, T value, SITE) const {
    emulator::write_local(HERE, (*this)[offset].operand(), &value);
  }

  LocalTensor() = default;
  explicit LocalTensor(emulator::Span span) : span(span) {}
  emulator::Operand operand() const { return {span, detail::type_of<T>::value}; }
  emulator::Span span;
};

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
    at = buffer;
    size = bufferSize;
  }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor rest;
    rest.SetGlobalBuffer(at + offset, size - offset);
    return rest;
  }
  T GetValue(uint64_t offset, SITE) const {
    if (offset >= size) emulator::refuse(HERE, "bounds", "GetValue beyond the global tensor");
    T value;
    emulator::read_global(HERE, address(offset), &value, sizeof value);
    return value;
  }
  void* address(uint64_t offset = 0) const { return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(at + offset)); }
  __gm__ T* at = nullptr;
  uint64_t size = 0;
};

template <TPosition position, int32_t depth, int mask = 0>
class TQue {
  static_assert(position == TPosition::VECIN || position == TPosition::VECOUT, "a queue stands between GM and V");

 public:
  template <typename T>
  LocalTensor<T> AllocTensor(SITE) {
    return LocalTensor<T>(emulator::alloc(HERE, queue));
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor, SITE) {
    emulator::enque(HERE, queue, tensor.span);
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue(SITE) {
    return LocalTensor<T>(emulator::deque(HERE, queue));
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor, SITE) {
    emulator::release(HERE, queue, tensor.span);
  }
  static constexpr int place = position == TPosition::VECIN ? 0 : 1, places = depth;
  int queue = -1;
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const {
    return LocalTensor<T>(span);
  }
  emulator::Span span;
};

class TPipe {
 public:
  template <class Queue>
  bool InitBuffer(Queue& que, uint8_t num, uint32_t len, SITE) {
    que.queue = emulator::new_queue(HERE, Queue::place, Queue::places, num, len);
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buf, uint32_t len, SITE) {
    buf.span = emulator::new_buffer(HERE, len);
    return true;
  }
  template <HardEvent event>
  TEventID AllocEventID(SITE) {
    return static_cast<TEventID>(emulator::new_event(HERE, detail::from(event), detail::to(event)));
  }
};

inline int64_t GetBlockIdx() { return emulator::block_index(); }
inline int64_t GetBlockNum() { return emulator::block_count(); }

template <HardEvent event>
inline void SetFlag(int32_t eventID, SITE) {
  emulator::set_flag(HERE, detail::from(event), detail::to(event), eventID);
}
template <HardEvent event>
inline void WaitFlag(int32_t eventID, SITE) {
  emulator::wait_flag(HERE, detail::from(event), detail::to(event), eventID);
}
template <pipe_t pipe>
inline void PipeBarrier(SITE) {
  emulator::barrier(HERE, pipe == PIPE_ALL ? -1 : static_cast<int>(pipe));
}

struct DataCopyExtParams {
  DataCopyExtParams(uint16_t count, uint32_t len, uint32_t srcStrideIn, uint32_t dstStrideIn, uint32_t rsvIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn), rsv(rsvIn) {}
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride, rsv;
};
template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams(bool isPadValue, uint8_t leftPadValue, uint8_t rightPadValue, T padValue)
      : isPad(isPadValue), leftPadding(leftPadValue), rightPadding(rightPadValue), paddingValue(padValue) {}
  bool isPad;
  uint8_t leftPadding, rightPadding;
  T paddingValue;
};

namespace detail {
inline void check_whole_blocks(Site site, int64_t bytes) {
  if (bytes % 32) refuse(site, "alignment", "DataCopy of bytes that are no multiple of 32: use DataCopyPad");
}
// One block, no strides: what the kernels use of DataCopyPad.
inline void check_one_block(Site site, const DataCopyExtParams& params) {
  if (params.blockCount != 1 || params.srcStride || params.dstStride) refuse(site, "dtype", "strides are not emulated");
  if (params.blockLen < 1 || params.blockLen > 2097151) refuse(site, "bounds", "blockLen outside 1..2097151");
}
template <class T>
inline void check_inside(Site site, const GlobalTensor<T>& tensor, int64_t bytes) {
  if (bytes > static_cast<int64_t>(tensor.size * sizeof(T))) refuse(site, "bounds", "beyond the global tensor");
}
}  // namespace detail

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count, SITE) {
  const int64_t bytes = static_cast<int64_t>(count) * sizeof(T);
  detail::check_whole_blocks(HERE, bytes);
  detail::check_inside(HERE, src, bytes);
  emulator::load(HERE, dst.operand(), src.address(), bytes, 0);
}
template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, SITE) {
  const int64_t bytes = static_cast<int64_t>(count) * sizeof(T);
  detail::check_whole_blocks(HERE, bytes);
  detail::check_inside(HERE, dst, bytes);
  emulator::store(HERE, dst.address(), src.operand(), bytes);
}
template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                        const DataCopyPadExtParams<T>& pad, SITE) {
  detail::check_one_block(HERE, params);
  detail::check_inside(HERE, src, params.blockLen);
  if (pad.isPad) emulator::refuse(HERE, "dtype", "padding with a value is not emulated");
  emulator::load(HERE, dst.operand(), src.address(), params.blockLen, (32 - params.blockLen % 32) % 32);
}
template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params, SITE) {
  detail::check_one_block(HERE, params);
  detail::check_inside(HERE, dst, params.blockLen);
  emulator::store(HERE, dst.address(), src.operand(), params.blockLen);
}

struct BinaryRepeatParams {
  BinaryRepeatParams(uint8_t dstBlkStrideIn, uint8_t src0BlkStrideIn, uint8_t src1BlkStrideIn, uint8_t dstRepStrideIn,
                     uint8_t src0RepStrideIn, uint8_t src1RepStrideIn)
      : dstBlkStride(dstBlkStrideIn),
        src0BlkStride(src0BlkStrideIn),
        src1BlkStride(src1BlkStrideIn),
        dstRepStride(dstRepStrideIn),
        src0RepStride(src0RepStrideIn),
        src1RepStride(src1RepStrideIn) {}
  uint8_t dstBlkStride, src0BlkStride, src1BlkStride, dstRepStride, src0RepStride, src1RepStride;
};

namespace detail {
// Whole repeats of 256 bytes, as far apart as the strides say (of blocks of 32 bytes, 0 to 255: the documentation of
// BinaryRepeatParams), of src1 also one block for a repeat: the forms that the kernels use.
template <class T>
inline Strides strides(Site site, uint64_t mask, uint8_t repeatTime, const BinaryRepeatParams& params) {
  const bool whole = params.dstBlkStride == 1 && params.src0BlkStride == 1 && params.src1BlkStride <= 1;
  if (!whole || mask * sizeof(T) != 256) refuse(site, "repeat", "only whole repeats, or a block of src1 for each");
  if (repeatTime < 1) refuse(site, "repeat", "repeatTime outside 1..255");
  return {params.dstRepStride, params.src0RepStride, params.src1RepStride, params.src1BlkStride == 0};
}
}  // namespace detail

#define BINARY(Name, op)                                                                                             \
  template <typename T>                                                                                              \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,                \
                   const int32_t& count, SITE) {                                                                     \
    emulator::vector(emulator::Op::op, HERE, dst.operand(), src0.operand(), src1.operand(), {}, count, 0, 0);        \
  }                                                                                                                  \
  template <typename T>                                                                                              \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask, \
                   const uint8_t repeatTime, const BinaryRepeatParams& params, SITE) {                               \
    emulator::vector_by_repeat(emulator::Op::op, HERE, dst.operand(), src0.operand(), src1.operand(), repeatTime,    \
                               detail::strides<T>(HERE, mask, repeatTime, params));                                  \
  }
BINARY(Add, add)
BINARY(Sub, sub)
BINARY(Mul, mul)
BINARY(Div, div)
BINARY(Max, max)
BINARY(Min, min)
BINARY(And, bit_and)
BINARY(Or, bit_or)
#undef BINARY

#define UNARY(Name, op)                                                                                \
  template <typename T>                                                                                \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, SITE) { \
    emulator::vector(emulator::Op::op, HERE, dst.operand(), src.operand(), {}, {}, count, 0, 0);       \
  }
UNARY(Abs, abs)
UNARY(Sqrt, sqrt)
UNARY(Not, bit_not)
#undef UNARY

#define WITH_SCALAR(Name, op)                                                                                        \
  template <typename T>                                                                                              \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count, \
                   SITE) {                                                                                           \
    emulator::vector(emulator::Op::op, HERE, dst.operand(), src.operand(), {}, {}, count,                            \
                     static_cast<double>(scalarValue), 0);                                                           \
  }
WITH_SCALAR(Adds, adds)
WITH_SCALAR(Muls, muls)
WITH_SCALAR(Maxs, maxs)
WITH_SCALAR(Mins, mins)
WITH_SCALAR(ShiftLeft, shift_left)
WITH_SCALAR(ShiftRight, shift_right)
#undef WITH_SCALAR

template <typename T>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, SITE) {
  emulator::vector(emulator::Op::duplicate, HERE, dst.operand(), {}, {}, {}, count, static_cast<double>(scalarValue),
                   0);
}

// dst[i] = firstValue + i. On a 2201 this is no vector instruction: the first eight values are stores of the scalar
// unit into UB, and vectors add up the rest from them. The call is taken to order its own additions after its own
// stores, and nothing else: vectors that used dst before, and those that read its first values after, are ordered by
// the kernel's flags (V to S, S to V), which --cce-auto-sync=off does not insert.
template <typename T>
inline void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, SITE) {
  static_assert(sizeof(T) == 4, "the first eight values are one block of 32 bytes");
  for (uint32_t i = 0; i < count && i < 8; ++i) dst.SetValue(i, firstValue + static_cast<T>(i), line, file);
  if (count > 8) {
    emulator::vector(emulator::Op::index, HERE, dst[8].operand(), dst.operand(), {}, {}, count - 8,
                     static_cast<double>(firstValue) + 8, 0);
  }
}

template <typename T1, typename T2>
inline void Cast(const LocalTensor<T1>& dst, const LocalTensor<T2>& src, const RoundMode& roundMode,
                 const uint32_t count, SITE) {
  emulator::vector(emulator::Op::cast, HERE, dst.operand(), src.operand(), {}, {}, count, 0,
                   static_cast<int>(roundMode));
}

template <typename T, typename U>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
                    uint32_t count, SITE) {
  emulator::vector(emulator::Op::compare, HERE, dst.operand(), src0.operand(), src1.operand(), {}, count, 0,
                   static_cast<int>(cmpMode));
}
template <typename T, typename U>
inline void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
                          uint32_t count, SITE) {
  emulator::vector(emulator::Op::compare_scalar, HERE, dst.operand(), src0.operand(), {}, {}, count,
                   static_cast<double>(src1Scalar), static_cast<int>(cmpMode));
}
// dst[i] = bit i of selMask ? src0[i] : src1[i]
template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
                   const LocalTensor<T>& src1, SELMODE selMode, uint32_t count, SITE) {
  if (selMode != SELMODE::VSEL_TENSOR_TENSOR_MODE) emulator::refuse(HERE, "dtype", "no SELMODE of two tensors");
  emulator::vector(emulator::Op::select, HERE, dst.operand(), src0.operand(), src1.operand(), selMask.operand(), count,
                   0, 0);
}
// dst[i] = bit i of selMask ? src0[i] : src1
template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
                   SELMODE selMode, uint32_t count, SITE) {
  if (selMode != SELMODE::VSEL_TENSOR_SCALAR_MODE) emulator::refuse(HERE, "dtype", "a SELMODE of two tensors");
  emulator::vector(emulator::Op::select_scalar, HERE, dst.operand(), src0.operand(), {}, selMask.operand(), count,
                   static_cast<double>(src1), 0);
}

struct BrcbRepeatParams {
  BrcbRepeatParams(uint16_t dstBlkStrideIn, uint16_t dstRepStrideIn)
      : dstBlkStride(dstBlkStrideIn), dstRepStride(dstRepStrideIn) {}
  uint16_t dstBlkStride, dstRepStride;
};
// The 32-byte block i of dst has element i of src0 in every place; 8 of them a repeat.
template <typename T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t repeatTime,
                 const BrcbRepeatParams& params, SITE) {
  if (params.dstBlkStride != 1 || params.dstRepStride != 8) refuse(HERE, "repeat", "Brcb with gaps is not emulated");
  emulator::broadcast(HERE, dst.operand(), src0.operand(), 8 * static_cast<int64_t>(repeatTime));
}

enum class ReduceOrder { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
// dst[i] = the largest of repeat i; whole repeats, one after the other, without an index.
template <typename T>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, ReduceOrder order, SITE) {
  const bool dense = dstRepStride == 1 && srcBlkStride == 1 && srcRepStride == 8;
  if (!dense || mask * sizeof(T) != 256 || order != ReduceOrder::ORDER_ONLY_VALUE) {
    refuse(HERE, "repeat", "WholeReduceMax but of whole repeats, and with an index, is not emulated");
  }
  if (repeatTime < 1 || repeatTime > 255) refuse(HERE, "repeat", "repeatTime outside 1..255");
  emulator::reduce_max(HERE, dst.operand(), src.operand(), repeatTime);
}

#undef SITE
#undef HERE

}  // namespace AscendC
