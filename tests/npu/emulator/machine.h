// What kernel_operator.h asks of the emulated core. Kept small: every kernel and every mutant of one compiles it.
#pragma once

#include <cstdint>

namespace emulator {

enum Pipe : int { S, V, MTE2, MTE3 };
constexpr int pipes = 4;

enum class Type : int { f32, bf16, f16, i32, u32, i16, u16, u8, i8, i4 };
constexpr int bits_of(Type type) {
  constexpr int sizes[] = {32, 16, 16, 32, 32, 16, 16, 8, 8, 4};
  return sizes[static_cast<int>(type)];
}
constexpr int64_t bytes_of(Type type, int64_t count) { return count * bits_of(type) / 8; }
constexpr int bytes_of(Type type) { return bits_of(type) / 8; }

enum class Op : int {
  add,
  sub,
  mul,
  div,
  max,
  min,
  bit_and,
  bit_or,
  bit_not,
  adds,
  muls,
  maxs,
  mins,
  abs,
  sqrt,
  shift_left,
  shift_right,
  duplicate,
  index,
  cast,
  compare,
  compare_scalar,
  select,
  select_scalar,
  broadcast,
  reduce_max,
  load,
  store,
  set_flag,
  wait_flag,
  release
};

// Where a call stands in a kernel's source.
struct Site {
  const char* file;
  int line;
};

// A range of UB inside one buffer; what is beyond `bytes` belongs to somebody else.
struct Span {
  int32_t at = 0, bytes = 0;
};

struct Operand {
  Span span;
  Type type = Type::f32;
};

// Vector instructions over the first `count` elements. `number` is the scalar, `mode` a rounding, comparison or base.
void vector(Op op, Site site, Operand target, Operand first, Operand second, Operand third, int64_t count,
            double number, int mode);
// Where a repeat begins, in blocks of 32 bytes after the one before it; the second source has a whole repeat, or one
// block for every block of the others' repeats.
struct Strides {
  int target = 8, first = 8, second = 8;
  bool second_is_block = false;
};
// The same over whole repeats that lie apart.
void vector_by_repeat(Op op, Site site, Operand target, Operand first, Operand second, int64_t repeats,
                      const Strides& strides);
// Of each lane of the source a block of 32 bytes; of each repeat of the source its largest.
void broadcast(Site site, Operand target, Operand source, int64_t lanes);
void reduce_max(Site site, Operand target, Operand source, int64_t repeats);

void load(Site site, Operand target, const void* source, int64_t bytes, int64_t pad_bytes);
void store(Site site, void* target, Operand source, int64_t bytes);
void read_local(Site site, Operand from, void* value);
void write_local(Site site, Operand to, const void* value);
void read_global(Site site, const void* from, void* value, int bytes);

void set_flag(Site site, Pipe from, Pipe to, int id);
void wait_flag(Site site, Pipe from, Pipe to, int id);
void barrier(Site site, int pipe);  // of one pipe, or of all (-1)
int new_event(Site site, Pipe from, Pipe to);

// Queues: positions as in kernel_operator.h, 0 VECIN and 1 VECOUT; a buffer is the number of its span.
int new_queue(Site site, int position, int depth, int buffers, int64_t bytes);
Span alloc(Site site, int queue);
void enque(Site site, int queue, Span span);
Span deque(Site site, int queue);
void release(Site site, int queue, Span span);
Span new_buffer(Site site, int64_t bytes);

int64_t block_index();
int64_t block_count();
[[noreturn]] void refuse(Site site, const char* check, const char* why);

}  // namespace emulator
