#include "machine/instruction.h"

#include <algorithm>
#include <cstring>

namespace emulator {

std::string at(Site site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name ? name + 1 : site.file) + ":" + std::to_string(site.line);
}

const char* name_of(Pipe pipe) {
  constexpr const char* names[] = {"S", "V", "MTE2", "MTE3"};
  return names[pipe];
}

namespace {
bool is_integer(Type type) { return type == Type::i32 || type == Type::i16; }

// Of the target, or of source k, where repeats lie apart: blocks from one to the next, and bytes of one.
std::pair<int64_t, int64_t> repeat_of(const Instruction& i, int k) {
  const int steps[] = {i.strides.target, i.strides.first, i.strides.second};
  return {steps[k + 1], k == 1 && i.strides.second_is_block ? block : repeat};
}

int64_t extent(const Instruction& i, int k) {
  const Operand& operand = k == target ? i.target : i.sources[k];
  if (!i.by_repeat) return bytes_of(operand.type, i.count);
  const auto [step, bytes] = repeat_of(i, k);
  return (bytes_of(operand.type, i.count) / repeat - 1) * step * block + bytes;
}
}  // namespace

bool knows(const Instruction& i) {
  const Type target = i.target.type, source = i.sources[0].type;
  const bool same = target == source, halves = target == Type::i16 || target == Type::u16;
  switch (i.op) {
    case Op::add:
    case Op::sub:
    case Op::mul:
    case Op::max:
    case Op::min:
    case Op::adds:
    case Op::muls:
    case Op::maxs:
    case Op::mins: return same && (target == Type::f32 || is_integer(target));
    case Op::div:
    case Op::abs:
    case Op::sqrt: return same && target == Type::f32;
    case Op::bit_and:
    case Op::bit_or:
    case Op::bit_not: return same && halves;
    case Op::shift_left:
    case Op::shift_right: return same && (halves || target == Type::i32 || target == Type::u32);
    case Op::duplicate: return bits_of(target) >= 16;
    case Op::index: return same && (target == Type::i32 || target == Type::f32);
    case Op::compare:
    case Op::compare_scalar:
      return target == Type::u8 && (source == Type::f32 || (source == Type::i32 && i.mode == 2));  // EQ
    case Op::select:
    case Op::select_scalar: return same && target == Type::f32 && i.sources[2].type == Type::u8;
    case Op::broadcast: return same && bytes_of(target) == 4;
    case Op::reduce_max: return same && target == Type::f32;
    case Op::cast: {
      const bool rounds = i.mode != rounding::none;
      if (source == Type::f32) {
        return rounds && (target == Type::bf16 || target == Type::f16 || target == Type::f32 || target == Type::i32 ||
                          target == Type::i16);
      }
      const auto narrow = [](Type type) { return type == Type::u8 || type == Type::i8 || type == Type::i4; };
      if (narrow(target)) return rounds && source == Type::f16;
      if (target == Type::f16) return source == Type::i16 || (narrow(source) && i.mode == rounding::none);
      if (target == Type::i16) return source == Type::i32 ? i.mode == rounding::none : rounds && source == Type::f16;
      if (target == Type::f32) {
        return source == Type::i32
                   ? i.mode == rounding::rint
                   : i.mode == rounding::none && (source == Type::bf16 || source == Type::f16 || source == Type::i16);
      }
      return false;
    }
    default: return true;
  }
}

int64_t write_bytes(const Instruction& i) {
  switch (i.op) {
    case Op::load: return i.bytes + i.pad;
    case Op::store: return 0;
    case Op::compare:
    case Op::compare_scalar: return (i.count + 7) / 8;
    default: return extent(i, target);
  }
}

std::vector<std::pair<Operand, int64_t>> reads(const Instruction& i) {
  const auto whole = [&](int k) { return std::pair{i.sources[k], extent(i, k)}; };
  switch (i.op) {
    case Op::load:
    case Op::duplicate: return {};
    case Op::index: return {{i.sources[0], block}};
    case Op::store: return {{i.sources[0], i.bytes}};
    case Op::broadcast: return {{i.sources[0], i.count * bytes_of(i.target.type) / block * bytes_of(i.target.type)}};
    case Op::reduce_max: return {{i.sources[0], i.count * repeat}};
    case Op::select: return {whole(0), whole(1), {i.sources[2], (i.count + 7) / 8}};
    case Op::select_scalar: return {whole(0), {i.sources[2], (i.count + 7) / 8}};
    case Op::add:
    case Op::sub:
    case Op::mul:
    case Op::div:
    case Op::max:
    case Op::min:
    case Op::bit_and:
    case Op::bit_or:
    case Op::compare: return {whole(0), whole(1)};
    default: return {whole(0)};
  }
}

std::vector<std::pair<Operand, int64_t>> parts(const Instruction& i, int k, const Operand& operand, int64_t bytes) {
  const auto [step, each] = repeat_of(i, k);
  if (!i.by_repeat || step * block <= each) return {{operand, bytes}};
  std::vector<std::pair<Operand, int64_t>> found;
  for (int64_t at = 0; at < bytes; at += step * block) {
    const auto skip = static_cast<int32_t>(at);
    found.push_back({{{operand.span.at + skip, operand.span.bytes - skip}, operand.type}, each});
  }
  return found;
}

std::pair<int64_t, int64_t> lane_of(const Instruction& i, int k, int64_t n) {
  const Type type = (k == target ? i.target : i.sources[k]).type;
  const int64_t size = std::max(bytes_of(type), 1);
  if (k != target) {
    if (i.op == Op::broadcast) return {n * size / block * size, size};
    if (i.op == Op::reduce_max) return {n * repeat, repeat};
    if (i.op == Op::index) return {n * size % block, size};
  }
  if (i.by_repeat) {
    const auto [step, bytes] = repeat_of(i, k);
    return {n * size / repeat * step * block + n * size % bytes, size};
  }
  return {bytes_of(type, n), size};
}

}  // namespace emulator
