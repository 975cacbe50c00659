// The calls of kernel_operator.h, of the core that is running, and a launch of all cores.
#include <algorithm>
#include <string>
#include <vector>

#include "machine.h"
#include "machine/core.h"
#include "run.h"

namespace emulator {

namespace {
Core* running = nullptr;
int blocks_running = 0;
}  // namespace

void refuse(Site site, const char* check, const char* why) { throw Fault(check, at(site) + ": " + why); }

void vector(Op op, Site site, Operand target, Operand first, Operand second, Operand third, int64_t count,
            double number, int mode) {
  Instruction i{op, V, site, target, {first, second, third}};
  i.count = count;
  i.number = number;
  i.mode = mode;
  if (!knows(i)) refuse(site, "dtype", "no such instruction for these types and this rounding");
  if (count < 1) refuse(site, "repeat", "a vector instruction over nothing");
  if ((op == Op::compare || op == Op::compare_scalar) && count * bytes_of(first.type) % repeat) {
    refuse(site, "repeat", "Compare leaves the tail out where its bytes are no multiple of 256");
  }
  if (op == Op::cast && count % 2 && (target.type == Type::i4 || first.type == Type::i4)) {
    refuse(site, "repeat", "Cast from or to int4b_t of an odd number of elements");
  }
  const Operand* sources[] = {&first, &second};
  for (const Operand* source : sources) {
    const bool meet = source->span.bytes && source->span.at < target.span.at + bytes_of(target.type, count) &&
                      target.span.at < source->span.at + bytes_of(source->type, count);
    const bool read = op != Op::duplicate && op != Op::index &&
                      (source == &first || op <= Op::bit_or || op == Op::select || op == Op::select_scalar);
    if (read && meet && (source->span.at != target.span.at || bits_of(source->type) != bits_of(target.type))) {
      refuse(site, "overlap", "target and source overlap without being the same");
    }
  }
  running->issue(i);
}

namespace {
void issue_known(Instruction i, int64_t count) {
  i.count = count;
  if (!knows(i)) refuse(i.site, "dtype", "no such instruction for these types");
  running->issue(i);
}
}  // namespace

void vector_by_repeat(Op op, Site site, Operand target, Operand first, Operand second, int64_t repeats,
                      const Strides& strides) {
  Instruction i{op, V, site, target, {first, second, {}}};
  i.by_repeat = true;
  i.strides = strides;
  i.count = repeats * repeat / bytes_of(target.type);
  if (strides.target < repeat / block && repeats > 1) refuse(site, "overlap", "repeats write what others wrote");
  const auto touched = reads(i);
  const int steps[] = {strides.first, strides.second};
  for (int k = 0; k < 2; ++k) {
    const auto& [source, bytes] = touched[k];
    const bool meet = source.span.at < target.span.at + write_bytes(i) && target.span.at < source.span.at + bytes;
    const bool same =
        source.span.at == target.span.at && steps[k] == strides.target && !(k == 1 && strides.second_is_block);
    if (meet && !same) refuse(site, "overlap", "target and source overlap without being the same");
  }
  issue_known(i, i.count);
}

void broadcast(Site site, Operand target, Operand source, int64_t lanes) {
  if (target.span.at < source.span.at + lanes * bytes_of(source.type) &&
      source.span.at < target.span.at + lanes * block) {
    refuse(site, "overlap", "target and source of Brcb overlap");
  }
  issue_known({Op::broadcast, V, site, target, {source, {}, {}}}, lanes * block / bytes_of(target.type));
}

void reduce_max(Site site, Operand target, Operand source, int64_t repeats) {
  issue_known({Op::reduce_max, V, site, target, {source, {}, {}}}, repeats);
}

void load(Site site, Operand target, const void* source, int64_t bytes, int64_t pad) {
  if (bytes < 1) refuse(site, "bounds", "a copy of nothing");
  Instruction i{Op::load, MTE2, site, target, {}};
  i.global = static_cast<uint8_t*>(const_cast<void*>(source));
  i.bytes = bytes;
  i.pad = pad;
  running->issue(i);
}

void store(Site site, void* target, Operand source, int64_t bytes) {
  if (bytes < 1) refuse(site, "bounds", "a copy of nothing");
  Instruction i{Op::store, MTE3, site, {}, {source, {}, {}}};
  i.global = static_cast<uint8_t*>(target);
  i.bytes = bytes;
  running->issue(i);
}

void read_local(Site site, Operand from, void* value) { running->scalar_local(site, from, value, false); }
void write_local(Site site, Operand to, const void* value) {
  running->scalar_local(site, to, const_cast<void*>(value), true);
}
void read_global(Site site, const void* from, void* value, int bytes) {
  running->scalar_global(site, from, value, bytes);
}
void set_flag(Site site, Pipe from, Pipe to, int id) { running->order().explicit_set(site, from, to, id); }
void wait_flag(Site site, Pipe from, Pipe to, int id) { running->order().explicit_wait(site, from, to, id); }
void barrier(Site site, int pipe) { running->order().barrier(site, pipe); }
int new_event(Site site, Pipe from, Pipe to) { return running->order().new_event(site, from, to); }
int new_queue(Site site, int position, int depth, int buffers, int64_t bytes) {
  return running->queues().add(site, position, depth, buffers, bytes);
}
Span alloc(Site site, int queue) { return running->queues().alloc(site, queue); }
void enque(Site site, int queue, Span span) { running->queues().enque(site, queue, span); }
Span deque(Site site, int queue) { return running->queues().deque(site, queue); }
void release(Site site, int queue, Span span) { running->queues().release(site, queue, span); }
Span new_buffer(Site site, int64_t bytes) { return running->ub().add_buffer(site, bytes, -1); }
int64_t block_index() { return running->index(); }
int64_t block_count() { return blocks_running; }

void Setting::check_extent(Site site, uint64_t begin, int64_t bytes, bool writes) const {
  const auto it = extents.upper_bound(begin);
  if (it != extents.begin()) {
    const auto& [start, extent] = *std::prev(it);
    if (begin >= start && begin + bytes <= extent.end) {
      if (writes && !extent.writable) refuse(site, "bounds", "a write to GM that is only read");
      return;
    }
  }
  refuse(site, "bounds",
         writes ? "a write to GM outside what the kernel was given" : "a read of GM outside what the kernel was given");
}

namespace {

// Lines of GM that one core wrote, and bytes that it read: no other core may have written them.
struct Shared {
  struct Mark {
    uint64_t begin, end;
    int core;
    bool writes;
  };
  std::vector<Mark> marks;

  void add(const Core& core) {
    core.gm_ranges().each([&](uint64_t begin, uint64_t end, const Ranges::Access& access) {
      if (access.write) {
        marks.push_back({begin / block * block, (end + block - 1) / block * block, core.index(), true});
      } else {
        marks.push_back({begin, end, core.index(), false});
      }
    });
  }

  void check(int cores) {
    std::sort(marks.begin(), marks.end(), [](const Mark& a, const Mark& b) { return a.begin < b.begin; });
    std::vector<uint64_t> read(cores), written(cores);  // how far each core's reads and writes reach
    for (const Mark& mark : marks) {
      for (int core = 0; core < cores; ++core) {
        if (core != mark.core && (written[core] > mark.begin || (mark.writes && read[core] > mark.begin))) {
          throw Fault("cores", "cores " + std::to_string(core) + " and " + std::to_string(mark.core) +
                                   " meet in one 32-byte line of GM");
        }
      }
      uint64_t& reach = (mark.writes ? written : read)[mark.core];
      reach = std::max(reach, mark.end);
    }
  }
};

}  // namespace

void run(Kernel kernel, int blocks, uint8_t* table, const Setting& setting, Counts& counts) {
  if (blocks < 1 || blocks > setting.cores) throw Fault("cores", "a launch on more blocks than there are cores");
  Shared shared;
  blocks_running = blocks;
  for (int b = 0; b < blocks; ++b) {
    Core core(setting, counts, b);
    running = &core;
    kernel(table);
    core.finish();
    running = nullptr;
    shared.add(core);
  }
  shared.check(blocks);
}

}  // namespace emulator
