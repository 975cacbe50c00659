#include "machine/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace emulator {
namespace {

uint32_t pattern(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

float number(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

float to_integer(float x, int mode) {
  switch (mode) {
    case rounding::rint: return std::nearbyint(x);
    case rounding::floor: return std::floor(x);
    case rounding::ceil: return std::ceil(x);
    case rounding::away: return std::round(x);
    default: return std::trunc(x);
  }
}

float from_f16(uint16_t u) {
  _Float16 narrow;
  std::memcpy(&narrow, &u, sizeof u);
  return static_cast<float>(narrow);
}

// Whether the neighbour farther from zero is chosen, of one that is `odd`, where `rest` of `whole` is dropped.
bool goes_up(uint32_t rest, uint32_t whole, bool odd, bool negative, int mode) {
  const uint32_t half = whole / 2;
  switch (mode) {
    case rounding::rint: return rest > half || (rest == half && odd);
    case rounding::away: return rest >= half;
    case rounding::floor: return negative && rest;
    case rounding::ceil: return !negative && rest;
    default: return false;
  }
}

uint16_t to_bf16(float x, int mode) {
  const uint32_t u = pattern(x);
  if (x != x) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u >> 16) + goes_up(u & 0xffff, 0x10000, u >> 16 & 1, u >> 31, mode));
}

uint16_t to_f16(float x, int mode) {
  const auto nearest = static_cast<_Float16>(x);
  uint16_t u;
  std::memcpy(&u, &nearest, sizeof u);
  if (mode == rounding::rint || mode == rounding::none || x != x || std::isinf(x)) return u;
  const float magnitude = std::fabs(x);
  auto below = static_cast<uint16_t>(u & 0x7fff);
  if (from_f16(below) > magnitude) below -= 1;
  const double low = from_f16(below), high = below == 0x7bff ? 65536.0 : from_f16(static_cast<uint16_t>(below + 1));
  const double rest = magnitude - low, half = (high - low) / 2;
  const uint32_t quarters = rest == 0 ? 0 : rest < half ? 1 : rest == half ? 2 : 3;
  return static_cast<uint16_t>((u & 0x8000) | (below + goes_up(quarters, 4, below & 1, std::signbit(x), mode)));
}

class Lanes {
 public:
  Lanes(Ub& ub, std::vector<uint8_t>& defined) : ub_(ub), lanes_(defined) {}
  void run(const Instruction& i);

 private:
  template <class T, class F>
  void each_lane(const Instruction& i, const F& f);
  template <class T>
  void arithmetic(const Instruction& i);
  template <class T>
  void bits(const Instruction& i);
  template <class T>
  void shift(const Instruction& i);
  template <class T>
  void compare(const Instruction& i);
  void cast(const Instruction& i);
  void to_narrow(const Instruction& i);

  Ub& ub_;
  std::vector<uint8_t>& lanes_;
};

// to[k] = f(a[k], b[k], k)
template <class T, class F>
void Lanes::each_lane(const Instruction& i, const F& f) {
  T* to = ub_.at<T>(i.target);
  const T* a = ub_.at<T>(i.sources[0]);
  const T* b = ub_.at<T>(i.sources[1]);
  if (!i.by_repeat) {
    for (int64_t k = 0; k < i.count; ++k) to[k] = f(a[k], b[k], k);
    return;
  }
  constexpr int64_t lanes = repeat / sizeof(T), beside = block / sizeof(T);
  const int64_t period = i.strides.second_is_block ? beside : lanes;
  for (int64_t k = 0; k < i.count; k += lanes) {
    for (int64_t n = 0; n < lanes; ++n) to[n] = f(a[n], b[n % period], k + n);
    to += i.strides.target * beside, a += i.strides.first * beside, b += i.strides.second * beside;
  }
}

template <class T>
void Lanes::arithmetic(const Instruction& i) {
  const T scalar = static_cast<T>(i.number);
  const auto each = [&](const auto& f) { each_lane<T>(i, f); };
  if constexpr (std::is_same_v<T, float>) {
    switch (i.op) {
      case Op::add: return each([](T x, T y, int64_t) { return x + y; });
      case Op::sub: return each([](T x, T y, int64_t) { return x - y; });
      case Op::mul: return each([](T x, T y, int64_t) { return x * y; });
      case Op::div: return each([](T x, T y, int64_t) { return x / y; });
      case Op::adds: return each([&](T x, T, int64_t) { return x + scalar; });
      case Op::muls: return each([&](T x, T, int64_t) { return x * scalar; });
      case Op::abs: return each([](T x, T, int64_t) { return number(pattern(x) & 0x7fffffffu); });
      case Op::sqrt: return each([](T x, T, int64_t) { return std::sqrt(x); });
      // Of a NaN, and of zeros of two signs, the documentation says nothing.
      case Op::max:
      case Op::min:
        return each([&](T x, T y, int64_t k) {
          if (x != x || y != y || (x == y && pattern(x) != pattern(y))) lanes_[k] = 0;
          return (i.op == Op::max) == (x > y) ? x : y;
        });
      default: return;
    }
  } else {
    const auto fitting = [&](int64_t wide, int64_t k) {
      if (wide != static_cast<T>(wide)) lanes_[k] = 0;  // whether it wraps or saturates is not documented
      return static_cast<T>(wide);
    };
    switch (i.op) {
      case Op::add: return each([&](T x, T y, int64_t k) { return fitting(int64_t{x} + y, k); });
      case Op::sub: return each([&](T x, T y, int64_t k) { return fitting(int64_t{x} - y, k); });
      case Op::mul: return each([&](T x, T y, int64_t k) { return fitting(int64_t{x} * y, k); });
      case Op::adds: return each([&](T x, T, int64_t k) { return fitting(int64_t{x} + scalar, k); });
      case Op::muls: return each([&](T x, T, int64_t k) { return fitting(int64_t{x} * scalar, k); });
      case Op::maxs: return each([&](T x, T, int64_t) { return std::max(x, scalar); });
      case Op::mins: return each([&](T x, T, int64_t) { return std::min(x, scalar); });
      case Op::max: return each([](T x, T y, int64_t) { return std::max(x, y); });
      case Op::min: return each([](T x, T y, int64_t) { return std::min(x, y); });
      default: return;
    }
  }
}

template <class T>
void Lanes::bits(const Instruction& i) {
  switch (i.op) {
    case Op::bit_and: return each_lane<T>(i, [](T x, T y, int64_t) { return static_cast<T>(x & y); });
    case Op::bit_or: return each_lane<T>(i, [](T x, T y, int64_t) { return static_cast<T>(x | y); });
    default: return each_lane<T>(i, [](T x, T, int64_t) { return static_cast<T>(~x); });
  }
}

template <class T>
void Lanes::shift(const Instruction& i) {
  T* to = ub_.at<T>(i.target);
  const T* a = ub_.at<T>(i.sources[0]);
  const int by = static_cast<int>(i.number);
  for (int64_t k = 0; k < i.count; ++k) {
    if (i.op == Op::shift_right) {
      to[k] = static_cast<T>(a[k] >> by);
    } else {
      const T before = a[k];
      to[k] = static_cast<T>(static_cast<uint64_t>(before) << by);
      if (std::is_signed_v<T> && (to[k] >> by) != before) lanes_[k] = 0;
    }
  }
}

template <class T>
void Lanes::compare(const Instruction& i) {
  uint8_t* to = ub_.at<uint8_t>(i.target);
  const T* a = ub_.at<T>(i.sources[0]);
  const T* b = ub_.at<T>(i.sources[1]);
  const bool scalar = i.op == Op::compare_scalar;
  for (int64_t k = 0; k < i.count; ++k) {
    const T x = a[k], y = scalar ? static_cast<T>(i.number) : b[k];
    const bool results[] = {x<y, x> y, x == y, x <= y, x >= y, x != y};  // CMPMODE's order
    const auto bit = static_cast<uint8_t>(1 << (k % 8));
    to[k / 8] = static_cast<uint8_t>(results[i.mode] ? to[k / 8] | bit : to[k / 8] & ~bit);
  }
}

// The integer of at most 8 bits that lane k is.
float narrow(Type type, const uint8_t* from, int64_t k) {
  if (type == Type::u8) return from[k];
  if (type == Type::i8) return static_cast<int8_t>(from[k]);
  return static_cast<float>(((from[k / 2] >> k % 2 * 4 & 15) ^ 8) - 8);
}

void Lanes::to_narrow(const Instruction& i) {
  const uint16_t* from = ub_.at<uint16_t>(i.sources[0]);
  uint8_t* to = ub_.at<uint8_t>(i.target);
  const int bits = bits_of(i.target.type);
  const int least = i.target.type == Type::u8 ? 0 : -(1 << (bits - 1));
  for (int64_t k = 0; k < i.count; ++k) {
    const float whole = to_integer(from_f16(from[k]), i.mode);
    const bool fits = whole >= static_cast<float>(least) && whole < static_cast<float>(least + (1 << bits));
    if (!fits) lanes_[k] = 0;
    const int value = (fits ? static_cast<int>(whole) : 0) & ((1 << bits) - 1);
    if (bits == 8) {
      to[k] = static_cast<uint8_t>(value);
    } else {
      to[k / 2] = static_cast<uint8_t>(k % 2 ? (to[k / 2] & 15) | value << 4 : value);
    }
  }
}

void Lanes::cast(const Instruction& i) {
  const auto each = [&](auto* to, const auto* from, const auto& f) {
    for (int64_t k = 0; k < i.count; ++k) to[k] = f(from[k], k);
  };
  const auto fitting = [&](auto* to, const auto* from, const auto& read) {
    using T = std::remove_pointer_t<decltype(to)>;
    each(to, from, [&](auto x, int64_t k) {
      const float whole = to_integer(read(x), i.mode);
      const double bound = std::ldexp(1.0, 8 * sizeof(T) - 1);
      if (!(whole >= -bound && whole < bound)) {
        lanes_[k] = 0;
        return T{0};
      }
      return static_cast<T>(whole);
    });
  };
  const Operand& source = i.sources[0];
  const auto same = [](auto x) { return static_cast<float>(x); };
  if (source.type == Type::f32) {
    const float* from = ub_.at<float>(source);
    switch (i.target.type) {
      case Type::bf16:
        return each(ub_.at<uint16_t>(i.target), from, [&](float x, int64_t) { return to_bf16(x, i.mode); });
      case Type::f16:
        return each(ub_.at<uint16_t>(i.target), from, [&](float x, int64_t) { return to_f16(x, i.mode); });
      case Type::f32:
        return each(ub_.at<float>(i.target), from, [&](float x, int64_t) { return to_integer(x, i.mode); });
      case Type::i32: return fitting(ub_.at<int32_t>(i.target), from, same);
      default: return fitting(ub_.at<int16_t>(i.target), from, same);
    }
  }
  if (bits_of(i.target.type) <= 8) return to_narrow(i);
  if (i.target.type == Type::i16) {
    int16_t* to = ub_.at<int16_t>(i.target);
    return source.type == Type::i32 ? fitting(to, ub_.at<int32_t>(source), same)
                                    : fitting(to, ub_.at<uint16_t>(source), from_f16);
  }
  if (i.target.type == Type::f16 && source.type == Type::i16) {
    return each(ub_.at<uint16_t>(i.target), ub_.at<int16_t>(source),
                [&](int16_t x, int64_t) { return to_f16(x, i.mode); });
  }
  if (bits_of(source.type) <= 8) {
    const uint8_t* from = ub_.at<uint8_t>(source);
    uint16_t* to = ub_.at<uint16_t>(i.target);
    for (int64_t k = 0; k < i.count; ++k) to[k] = to_f16(narrow(source.type, from, k), rounding::none);
    return;
  }
  float* to = ub_.at<float>(i.target);
  switch (source.type) {
    case Type::bf16:
      return each(to, ub_.at<uint16_t>(source), [](uint16_t u, int64_t) { return number(uint32_t{u} << 16); });
    case Type::f16: return each(to, ub_.at<uint16_t>(source), [](uint16_t u, int64_t) { return from_f16(u); });
    case Type::i32: return each(to, ub_.at<int32_t>(source), [](int32_t x, int64_t) { return static_cast<float>(x); });
    default: return each(to, ub_.at<int16_t>(source), [](int16_t x, int64_t) { return static_cast<float>(x); });
  }
}

void Lanes::run(const Instruction& i) {
  const Type type = i.op == Op::compare || i.op == Op::compare_scalar ? i.sources[0].type : i.target.type;
  switch (i.op) {
    case Op::cast: return cast(i);
    case Op::bit_and:
    case Op::bit_or:
    case Op::bit_not: return bits<uint16_t>(i);
    case Op::shift_left:
    case Op::shift_right:
      return type == Type::i32   ? shift<int32_t>(i)
             : type == Type::u32 ? shift<uint32_t>(i)
             : type == Type::i16 ? shift<int16_t>(i)
                                 : shift<uint16_t>(i);
    case Op::compare:
    case Op::compare_scalar: return type == Type::f32 ? compare<float>(i) : compare<int32_t>(i);
    case Op::select:
    case Op::select_scalar: {
      auto* to = ub_.at<uint32_t>(i.target);
      const auto *a = ub_.at<uint32_t>(i.sources[0]), *b = ub_.at<uint32_t>(i.sources[1]);
      const auto* mask = ub_.at<uint8_t>(i.sources[2]);
      const uint32_t scalar = pattern(static_cast<float>(i.number));
      for (int64_t k = 0; k < i.count; ++k) {
        to[k] = mask[k / 8] >> (k % 8) & 1 ? a[k] : (i.op == Op::select ? b[k] : scalar);
      }
      return;
    }
    case Op::broadcast: {
      auto* to = ub_.at<uint32_t>(i.target);
      const auto* from = ub_.at<uint32_t>(i.sources[0]);
      for (int64_t k = 0; k < i.count; ++k) to[k] = from[k / 8];
      return;
    }
    case Op::reduce_max: {
      constexpr int64_t lanes = repeat / sizeof(float);
      auto* to = ub_.at<float>(i.target);
      const auto* from = ub_.at<float>(i.sources[0]);
      for (int64_t k = 0; k < i.count; ++k, from += lanes) {
        to[k] = *std::max_element(from, from + lanes);
        // Of a NaN, and of zeros of two signs, the documentation says nothing.
        for (int64_t n = 0; n < lanes; ++n) {
          if (from[n] != from[n] || (from[n] == to[k] && pattern(from[n]) != pattern(to[k]))) lanes_[k] = 0;
        }
      }
      return;
    }
    case Op::duplicate:
    case Op::index:
      for (int64_t k = 0; k < i.count; ++k) {
        const double value = i.number + (i.op == Op::index ? static_cast<double>(k) : 0.0);
        if (type == Type::f32) {
          ub_.at<float>(i.target)[k] = static_cast<float>(value);
        } else if (bytes_of(type) == 4) {
          ub_.at<uint32_t>(i.target)[k] = static_cast<uint32_t>(static_cast<int64_t>(value));
        } else {
          ub_.at<uint16_t>(i.target)[k] = static_cast<uint16_t>(static_cast<int64_t>(value));
        }
      }
      return;
    default:
      return type == Type::f32   ? arithmetic<float>(i)
             : type == Type::i32 ? arithmetic<int32_t>(i)
                                 : arithmetic<int16_t>(i);
  }
}

}  // namespace

void run_op(const Instruction& i, Ub& ub, std::vector<uint8_t>& lanes) { Lanes(ub, lanes).run(i); }

}  // namespace emulator
