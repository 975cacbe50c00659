// One emulated core of a 2201, after the documentation: a scalar unit that runs the kernel's own code and issues
// instructions into the queues of three pipes (V, MTE2, MTE3), which run by themselves. Two things are kept apart:
//
//   what must be so    at issue: alignment, bounds, types, queues and flags, and for every byte of UB and GM whether an
//                      earlier access on which this one depends is certain to be over (clocks, as race detectors keep
//                      them). A race is a fault here whether values suffer or not.
//   what happens       at execution, in an order that a schedule chooses among those that pipes and flags allow.
//
// Instructions of one pipe are in flight together until a barrier or a flag says otherwise, as on a 2201. What the
// device leaves undefined (memory nobody wrote, integer overflow) is undefined here, element by element, and a fault
// where it would reach GM, the scalar unit or an address.
#include "machine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "run.h"

namespace emulator {
namespace {

constexpr int64_t ub_capacity = 188160;
constexpr int64_t block = 32;     // bytes that an address in UB is a multiple of
constexpr int64_t red_zone = 64;  // bytes before and after each buffer that nothing may touch
constexpr int64_t repeat = 256;   // bytes that one repeat of a vector instruction works on
constexpr int64_t groups = 16;    // of UB's banks: block i is in group i % groups, and a group gives one block a cycle
constexpr int events = 6;         // of one kind, that a kernel may have
constexpr int queue_ids = 16;     // flags from here on belong to queues
constexpr int outstanding = 8;    // tensors of one position
constexpr int most_buffers = 64;
constexpr size_t queue_length = 48;  // instructions that a pipe takes before the scalar unit waits for it
constexpr int dense = -1;
constexpr uint8_t poison = 0x7b, zone = 0xa5, defined = 0xff;

struct Clock {
  std::array<int64_t, pipes> seen{};  // of each pipe, the last instruction that is certain to be over

  void merge(const Clock& other) {
    for (int p = 0; p < pipes; ++p) seen[p] = std::max(seen[p], other.seen[p]);
  }
};

using FlagKey = std::array<int, 3>;  // from, to, id

struct Instruction {
  Op op;
  Pipe pipe;
  Site site;
  Operand target, sources[3];
  int64_t count = 0;
  double number = 0;
  int mode = 0;
  int block_step = dense;  // or of a second source that has one block a repeat, blocks to the next repeat's
  uint8_t* global = nullptr;
  int64_t bytes = 0, pad = 0;
  FlagKey flag{};
  bool synchronizes() const { return op == Op::set_flag || op == Op::wait_flag || op == Op::release; }
};

std::string at(Site site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name ? name + 1 : site.file) + ":" + std::to_string(site.line);
}

constexpr const char* pipe_names[] = {"S", "V", "MTE2", "MTE3"};

// Who touched which bytes last.
class Ranges {
 public:
  struct Access {
    int64_t write = 0, reads[pipes] = {};
    Pipe writer = S;
    Site write_site{}, read_sites[pipes] = {};
  };

  void touch(const char* memory, uint64_t begin, uint64_t end, bool writes, Pipe pipe, int64_t sequence,
             const Clock& clock, Site site) {
    split(begin);
    split(end);
    uint64_t next = begin;
    auto it = held_.lower_bound(begin);
    while (next < end) {
      if (it == held_.end() || it->first >= end || it->first > next) {
        const uint64_t until = it == held_.end() ? end : std::min(end, it->first);
        it = held_.emplace_hint(it, next, Held{until, {}});
      }
      Access& access = it->second.access;
      const auto ordered = [&](Pipe other, int64_t past) {
        return past <= clock.seen[other] || (other == pipe && past == sequence);  // in place
      };
      if (access.write && !ordered(access.writer, access.write)) {
        race(memory, access.write_site, access.writer, writes ? "writes, then writes" : "writes, then reads", pipe,
             site);
      }
      if (writes) {
        for (int p = 0; p < pipes; ++p) {
          if (access.reads[p] && !ordered(static_cast<Pipe>(p), access.reads[p])) {
            race(memory, access.read_sites[p], static_cast<Pipe>(p), "reads, then writes", pipe, site);
          }
        }
        access = Access{};
        access.write = sequence;
        access.writer = pipe;
        access.write_site = site;
      } else {
        access.reads[pipe] = sequence;
        access.read_sites[pipe] = site;
      }
      next = it->second.end;
      ++it;
    }
  }

  template <class Body>
  void each(const Body& body) const {
    for (const auto& [begin, held] : held_) body(begin, held.end, held.access);
  }

 private:
  struct Held {
    uint64_t end;
    Access access;
  };

  void split(uint64_t at) {
    auto it = held_.upper_bound(at);
    if (it == held_.begin()) return;
    --it;
    if (it->first < at && at < it->second.end) {
      held_.emplace(at, it->second);
      it->second.end = at;
    }
  }

  [[noreturn]] static void race(const char* memory, Site earlier, Pipe first, const char* what, Pipe second,
                                Site site) {
    throw Fault("race", std::string(memory) + ": " + pipe_names[first] + " at " + at(earlier) + " " + what + " with " +
                            pipe_names[second] + " at " + at(site) + ", and nothing orders them");
  }

  std::map<uint64_t, Held> held_;
};

struct Flag {
  bool set = false;
  Clock clock;
  int fired = 0;
};

enum class State { free, held, queued, out };

struct Buffer {
  Span span;
  int64_t place;  // on the device, where buffers lie end to end without red zones
  int queue;      // -1: of a TBuf
  State state;
  bool used_before = false;
};

struct Queue {
  int position, depth;
  std::vector<int> buffers;
  std::deque<int> fifo;
  size_t turn = 0;
};

}  // namespace

class Core {
 public:
  Core(const Setting& setting, Counts& counts, int index) : setting_(setting), counts_(counts), index_(index) {
    random_ = static_cast<uint64_t>(setting.seed) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(index) + 1;
  }

  int index() const { return index_; }

  // --- memory -------------------------------------------------------------------------------------------------------

  Span add_buffer(Site site, int64_t bytes, int queue) {
    if (bytes <= 0) refuse(site, "capacity", "a buffer of no bytes");
    const int64_t size = (bytes + block - 1) / block * block, place = used_;
    used_ += size;
    if (used_ > ub_capacity) refuse(site, "capacity", "more than 188160 bytes of UB");
    if (buffers_.size() == most_buffers) refuse(site, "queue", "more than 64 buffers");
    const int64_t start = static_cast<int64_t>(ub_.size()) + red_zone;
    ub_.resize(start, zone);
    ub_.resize(start + size, poison);
    ub_.resize(start + size + red_zone, zone);
    shadow_.resize(ub_.size(), 0);
    const Span span{static_cast<int32_t>(start), static_cast<int32_t>(size)};
    buffers_.push_back({span, place, queue, queue < 0 ? State::out : State::free});
    return span;
  }

  // --- queues -------------------------------------------------------------------------------------------------------

  int add_queue(Site site, int position, int depth, int buffers, int64_t bytes) {
    if (depth < 1 || buffers < 1) refuse(site, "queue", "a queue without places");
    queues_.push_back({position, depth, {}, {}, 0});
    const int queue = static_cast<int>(queues_.size()) - 1;
    for (int i = 0; i < buffers; ++i) {
      add_buffer(site, bytes, queue);
      queues_[queue].buffers.push_back(static_cast<int>(buffers_.size()) - 1);
      new_event(site, filler(position), drainer(position), true);
      new_event(site, drainer(position), filler(position), true);
    }
    return queue;
  }

  Span alloc(Site site, int queue) {
    Queue& q = queues_.at(queue);
    int busy = 0;
    for (const Buffer& buffer : buffers_) {
      busy += buffer.queue >= 0 && queues_[buffer.queue].position == q.position && buffer.state != State::free;
    }
    if (busy >= outstanding) refuse(site, "queue", "more than 8 tensors outstanding of one position");
    for (size_t i = 0; i < q.buffers.size(); ++i) {
      const int index = q.buffers[(q.turn + i) % q.buffers.size()];
      if (buffers_[index].state != State::free) continue;
      q.turn = (q.turn + i + 1) % q.buffers.size();
      if (buffers_[index].used_before) wait(site, drainer(q.position), filler(q.position), queue_ids + index, false);
      buffers_[index].state = State::held;
      return buffers_[index].span;
    }
    refuse(site, "queue", "AllocTensor, and every buffer is in use: one was not freed");
  }

  void enque(Site site, int queue, Span span) {
    Queue& q = queues_.at(queue);
    const int index = buffer_at(site, span);
    if (dropped(site, Drop::all)) return;
    if (buffers_[index].queue != queue || buffers_[index].state != State::held) {
      refuse(site, "queue", "EnQue of a tensor that was not allocated from this queue");
    }
    if (static_cast<int>(q.fifo.size()) == q.depth) refuse(site, "queue", "EnQue beyond the queue's depth");
    buffers_[index].state = State::queued;
    q.fifo.push_back(index);
    set(site, filler(q.position), drainer(q.position), queue_ids + index, true);
  }

  Span deque(Site site, int queue) {
    Queue& q = queues_.at(queue);
    if (q.fifo.empty()) refuse(site, "queue", "DeQue of an empty queue");
    const int index = q.fifo.front();
    if (dropped(site, Drop::all)) return buffers_[index].span;
    q.fifo.pop_front();
    buffers_[index].state = State::out;
    wait(site, filler(q.position), drainer(q.position), queue_ids + index, true);
    return buffers_[index].span;
  }

  void release(Site site, int queue, Span span) {
    const int index = buffer_at(site, span);
    if (dropped(site, Drop::all)) return;
    if (buffers_[index].queue != queue || buffers_[index].state != State::out) {
      refuse(site, "queue", "FreeTensor of a tensor that did not come out of this queue");
    }
    buffers_[index].state = State::free;
    buffers_[index].used_before = true;
    Instruction instruction{Op::release, drainer(queues_[queue].position), site, {}, {}};
    instruction.target.span = buffers_[index].span;
    push(instruction);
    set(site, drainer(queues_[queue].position), filler(queues_[queue].position), queue_ids + index, false);
  }

  // --- flags --------------------------------------------------------------------------------------------------------

  int new_event(Site site, Pipe from, Pipe to, bool of_queue = false) {
    int& used = events_[{from, to, 0}];
    if (used == events) refuse(site, "flag", "more than 6 events of one kind");
    if (!of_queue) allocated_[{from, to, used}] = true;
    return used++;
  }

  void explicit_set(Site site, Pipe from, Pipe to, int id) {
    if (!allocated_.count({from, to, id})) refuse(site, "flag", "SetFlag of an event that was not allocated");
    if (!dropped(site, Drop::all)) set(site, from, to, id, true);
  }

  void explicit_wait(Site site, Pipe from, Pipe to, int id) {
    if (!allocated_.count({from, to, id})) refuse(site, "flag", "WaitFlag of an event that was not allocated");
    if (!dropped(site, Drop::all)) wait(site, from, to, id, true);
  }

  void barrier(Site site, int pipe) {
    note(site, "PipeBarrier");
    if (pipe < 0 || pipe == V) waited_ = true;
    if (dropped(site, Drop::all) || dropped(site, Drop::order)) return;
    if (pipe < 0) {
      drain();
      Clock all;
      for (int p = 0; p < pipes; ++p) all.seen[p] = issued_[p];
      for (Clock& clock : clocks_) clock.merge(all);
    } else {
      clocks_[pipe].seen[pipe] = issued_[pipe];
      Instruction mark{Op::release, static_cast<Pipe>(pipe), site, {}, {}};
      push(mark);  // nothing to free: later instructions do not overtake it
    }
  }

  // --- instructions -------------------------------------------------------------------------------------------------

  void issue(Instruction instruction) {
    const Pipe pipe = instruction.pipe;
    const int64_t sequence = ++issued_[pipe];
    Clock clock = clocks_[pipe];
    for (int p = 0; p < pipes; ++p) {  // issued after what the scalar unit has waited for
      if (p != S) clock.seen[p] = std::max(clock.seen[p], clocks_[S].seen[p]);
    }
    if (instruction.op == Op::index) clock.seen[S] = issued_[S];  // CreateVecIndex orders its own stores before it
    const auto touch = [&](const Operand& operand, int64_t bytes, bool writes) {
      if (bytes <= 0) return;
      if (operand.span.at % block) refuse(instruction.site, "alignment", "an address in UB off a 32-byte boundary");
      inside(instruction.site, operand.span, bytes);
      ub_ranges_.touch("UB", operand.span.at, operand.span.at + bytes, writes, pipe, sequence, clock, instruction.site);
    };
    // What it writes first: where it works in place, its own read would hide an earlier one.
    touch(instruction.target, write_bytes(instruction), true);
    for (const auto& [operand, bytes] : reads(instruction)) touch(operand, bytes, false);
    if (instruction.global) {
      const auto begin = reinterpret_cast<uint64_t>(instruction.global);
      const bool stores = instruction.op == Op::store;
      setting_.check_extent(instruction.site, begin, instruction.bytes, stores);
      gm_ranges_.touch("GM", begin, begin + instruction.bytes, stores, pipe, sequence, clock, instruction.site);
      (stores ? counts_.stored : counts_.loaded) += instruction.bytes;
      counts_.moves += 1;
    }
    count(instruction);
    push(instruction);
  }

  void scalar_local(Site site, const Operand& operand, void* value, bool writes) {
    const int bytes = bytes_of(operand.type);
    inside(site, operand.span, bytes);
    ub_ranges_.touch("UB", operand.span.at, operand.span.at + bytes, writes, S, scalar_step(), clocks_[S], site);
    if (writes) {
      std::memcpy(&ub_[operand.span.at], value, bytes);
      std::fill_n(&shadow_[operand.span.at], bytes, defined);
    } else {
      if (!all_defined(operand.span.at, bytes)) refuse(site, "poison", "GetValue of memory that nothing has written");
      std::memcpy(value, &ub_[operand.span.at], bytes);
    }
    counts_.scalar_accesses += 1;
  }

  void scalar_global(Site site, const void* from, void* value, int bytes) {
    const auto begin = reinterpret_cast<uint64_t>(from);
    setting_.check_extent(site, begin, bytes, false);
    gm_ranges_.touch("GM", begin, begin + bytes, false, S, scalar_step(), clocks_[S], site);
    std::memcpy(value, from, bytes);
  }

  void finish() {
    drain();
    const Site end{"the end of the kernel", 0};
    for (const auto& [key, flag] : flags_) {
      if (flag.set && key[2] < queue_ids) refuse(end, "flag", "a flag was set and never waited for");
    }
    for (const Buffer& buffer : buffers_) {
      if (buffer.queue >= 0 && buffer.state != State::free) refuse(end, "queue", "a tensor was not freed");
    }
    std::vector<bool> owned(ub_.size(), false);
    for (const Buffer& buffer : buffers_) {
      std::fill_n(owned.begin() + buffer.span.at, buffer.span.bytes, true);
    }
    for (size_t i = 0; i < ub_.size(); ++i) {
      if (!owned[i] && ub_[i] != zone) refuse(end, "bounds", "a red zone was written");
    }
    counts_.ub_bytes = std::max(counts_.ub_bytes, used_);
  }

  const Ranges& gm_ranges() const { return gm_ranges_; }

 private:
  static Pipe filler(int position) { return position == 0 ? MTE2 : V; }
  static Pipe drainer(int position) { return position == 0 ? V : MTE3; }

  int64_t scalar_step() { return clocks_[S].seen[S] = ++issued_[S]; }

  int buffer_at(Site site, Span span) const {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (span.at >= buffers_[i].span.at && span.at < buffers_[i].span.at + buffers_[i].span.bytes) {
        return static_cast<int>(i);
      }
    }
    refuse(site, "bounds", "an address outside every buffer");
  }

  void inside(Site site, Span span, int64_t bytes) const {
    if (span.bytes < bytes) refuse(site, "bounds", "beyond the end of a buffer in UB");
    if (buffers_[buffer_at(site, span)].state == State::free) refuse(site, "queue", "use of a tensor after its end");
  }

  // --- what is to be dropped ----------------------------------------------------------------------------------------

  void note(Site site, const char* what) const { setting_.sites[{at(site), what}] += 1; }
  bool dropped(Site site, Drop how) const { return setting_.drop == how && setting_.dropped == at(site); }

  void set(Site site, Pipe from, Pipe to, int id, bool notes) {
    if (notes)
      note(site, id < queue_ids ? "SetFlag" : "EnQue");
    else
      note(site, "FreeTensor");
    Flag& flag = flags_[{from, to, id}];
    if (flag.set) refuse(site, "flag", "a flag set twice, and not waited for between");
    flag.set = true;
    flag.clock = Clock{};
    if (dropped(site, Drop::order)) {
      flag.fired += 1;
      return;
    }
    flag.clock = clocks_[from];
    flag.clock.seen[from] = issued_[from];
    for (int p = 0; p < pipes; ++p) {
      if (p != S) flag.clock.seen[p] = std::max(flag.clock.seen[p], clocks_[S].seen[p]);
    }
    if (from == S) {
      flag.fired += 1;
    } else {
      Instruction instruction{Op::set_flag, from, site, {}, {}};
      instruction.flag = {from, to, id};
      push(instruction);
    }
  }

  void wait(Site site, Pipe from, Pipe to, int id, bool notes) {
    if (notes)
      note(site, id < queue_ids ? "WaitFlag" : "DeQue");
    else
      note(site, "AllocTensor");
    Flag& flag = flags_[{from, to, id}];
    if (!flag.set) refuse(site, "flag", "a flag waited for that nobody has set");
    flag.set = false;
    if (dropped(site, Drop::order)) {
      flag.fired -= 1;
      return;
    }
    clocks_[to].merge(flag.clock);
    if (to == V) waited_ = true;
    if (to == S) {
      while (flag.fired < 1) advance(from);
      flag.fired -= 1;
    } else {
      Instruction instruction{Op::wait_flag, to, site, {}, {}};
      instruction.flag = {from, to, id};
      push(instruction);
    }
  }

  // --- the pipes ----------------------------------------------------------------------------------------------------

  void push(const Instruction& instruction) {
    queue_[instruction.pipe].push_back(instruction);
    const auto eagerly = [&](Pipe pipe) {
      while (ready(pipe)) step(pipe);
    };
    switch (setting_.schedule) {
      case Schedule::in_order: drain(); break;
      case Schedule::stores_late: eager(eagerly, MTE2, V); break;
      case Schedule::loads_early: eager(eagerly, MTE2, MTE2); break;
      case Schedule::loads_late: eager(eagerly, V, MTE3); break;
      case Schedule::random:
        for (uint64_t i = draw(4); i > 0; --i) {
          const auto pipe = static_cast<Pipe>(1 + draw(3));
          if (ready(pipe)) step(pipe);
        }
        break;
    }
    while (queue_[instruction.pipe].size() > queue_length) advance(instruction.pipe);
  }

  template <class Body>
  void eager(const Body& body, Pipe first, Pipe second) {
    for (size_t before = 0, after = queued(); before != after; after = queued()) {
      before = after;
      body(first);
      body(second);
    }
  }

  size_t queued() const { return queue_[V].size() + queue_[MTE2].size() + queue_[MTE3].size(); }

  bool ready(Pipe pipe) {
    if (queue_[pipe].empty()) return false;
    const Instruction& head = queue_[pipe].front();
    return head.op != Op::wait_flag || flags_[head.flag].fired > 0;
  }

  // The head of a pipe; in the random schedule one of those that are in flight together.
  void step(Pipe pipe) {
    auto& queue = queue_[pipe];
    size_t chosen = 0;
    if (setting_.schedule == Schedule::random && !queue.front().synchronizes()) {
      size_t together = 0;
      while (together < queue.size() && !queue[together].synchronizes()) ++together;
      chosen = draw(together);
    }
    const Instruction instruction = queue[chosen];
    queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(chosen));
    execute(instruction);
  }

  // Runs a pipe by one instruction, and others as far as that needs.
  void advance(Pipe pipe) {
    while (!ready(pipe)) {
      if (queue_[pipe].empty()) refuse({"the schedule", 0}, "flag", "everything waits");
      advance(static_cast<Pipe>(queue_[pipe].front().flag[0]));
    }
    step(pipe);
  }

  void drain() {
    for (Pipe pipe : {MTE2, V, MTE3}) {
      while (!queue_[pipe].empty()) advance(pipe);
    }
  }

  uint64_t draw(uint64_t below) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return (random_ >> 33) % below;
  }

  // --- what an instruction touches ----------------------------------------------------------------------------------

  static int64_t write_bytes(const Instruction& i) {
    switch (i.op) {
      case Op::load: return i.bytes + i.pad;
      case Op::store: return 0;
      case Op::compare:
      case Op::compare_scalar: return (i.count + 7) / 8;
      default: return i.count * bytes_of(i.target.type);
    }
  }

  static std::vector<std::pair<Operand, int64_t>> reads(const Instruction& i) {
    const auto whole = [&](int k) { return std::pair{i.sources[k], i.count * bytes_of(i.sources[k].type)}; };
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
      case Op::compare:
        return {whole(0),
                i.block_step == dense ? whole(1) : std::pair{i.sources[1], block_at(i, i.count - 1) * block + block}};
      default: return {whole(0)};
    }
  }

  // Of a second source with one block a repeat, the block that lane k reads.
  static int64_t block_at(const Instruction& i, int64_t k) {
    return k * bytes_of(i.target.type) / repeat * i.block_step;
  }

  // Where in source k of an instruction the first byte of its lane n is, and how many there are.
  static std::pair<int64_t, int64_t> lane_of(const Instruction& i, size_t k, int64_t n) {
    const int64_t size = bytes_of(i.sources[k].type);
    if (i.op == Op::broadcast) return {n * size / block * size, size};
    if (i.op == Op::reduce_max) return {n * repeat, repeat};
    if (i.op == Op::index) return {n * size % block, size};
    if (k == 1 && i.block_step != dense) return {block_at(i, n) * block + n * size % block, size};
    return {n * size, size};
  }

  void count(const Instruction& i) {
    if (i.pipe != V) return;
    int64_t widest = bytes_of(i.target.type);
    for (const auto& [operand, bytes] : reads(i)) widest = std::max<int64_t>(widest, bytes_of(operand.type));
    const int64_t repeats = i.op == Op::reduce_max ? i.count : (i.count * widest + repeat - 1) / repeat;
    counts_.vector_instructions += 1;
    counts_.steps += waited_;
    waited_ = false;
    (i.op == Op::div || i.op == Op::sqrt ? counts_.slow_repeats : counts_.repeats) += repeats;
    if (is_binary(i)) {
      for (int64_t r = 0; r < repeats; ++r) counts_.conflicts += conflicts(i, r);
    }
  }

  int64_t device_block(const Instruction& i, int k) const {
    const Buffer& buffer = buffers_[buffer_at(i.site, i.sources[k].span)];
    return (buffer.place + i.sources[k].span.at - buffer.span.at) / block;
  }

  static bool is_binary(const Instruction& i) {
    return i.op <= Op::bit_or || i.op == Op::compare || i.op == Op::select;
  }

  // Whether any two blocks that a repeat takes of its two sources are in one group.
  bool conflicts(const Instruction& i, int64_t r) {
    const int64_t left = i.count * bytes_of(i.sources[0].type) - r * repeat;
    const int64_t blocks = (std::min(left, repeat) + block - 1) / block;
    const bool dense_too = i.block_step == dense;
    const int64_t one = device_block(i, 0) + r * (repeat / block);
    const int64_t other = device_block(i, 1) + r * (dense_too ? repeat / block : i.block_step);
    const int64_t apart = ((other - one) % groups + groups) % groups;
    return apart < blocks || (dense_too && groups - apart < blocks);
  }

  // --- execution ----------------------------------------------------------------------------------------------------

  bool all_defined(int64_t at, int64_t bytes) const {
    uint8_t together = defined;
    for (int64_t i = 0; i < bytes; ++i) together &= shadow_[at + i];
    return together == defined;
  }

  void execute(const Instruction& i) {
    switch (i.op) {
      case Op::set_flag: flags_[i.flag].fired += 1; return;
      case Op::wait_flag: flags_[i.flag].fired -= 1; return;
      case Op::release:
        std::fill_n(ub_.begin() + i.target.span.at, i.target.span.bytes, poison);
        std::fill_n(shadow_.begin() + i.target.span.at, i.target.span.bytes, uint8_t{0});
        return;
      case Op::load: {
        uint8_t* to = &ub_[i.target.span.at];
        std::memcpy(to, i.global, i.bytes);
        std::fill_n(to + i.bytes, i.pad, poison);
        std::fill_n(&shadow_[i.target.span.at], i.bytes, defined);
        std::fill_n(&shadow_[i.target.span.at] + i.bytes, i.pad, uint8_t{0});
        return;
      }
      case Op::store:
        if (!all_defined(i.sources[0].span.at, i.bytes)) {
          refuse(i.site, "poison", "what is stored was never computed, or is undefined on the device");
        }
        std::memcpy(i.global, &ub_[i.sources[0].span.at], i.bytes);
        return;
      default: compute(i);
    }
  }

  template <class T>
  T* memory(const Operand& operand) {
    return reinterpret_cast<T*>(&ub_[operand.span.at]);
  }

  // lanes[k]: whether element k of the result is defined.
  void compute(const Instruction& i) {
    lanes_.assign(i.count, defined);
    const auto touched = reads(i);
    for (size_t k = 0; k < touched.size(); ++k) {
      const Operand& operand = touched[k].first;
      const bool chooses = i.op == Op::select || i.op == Op::select_scalar;
      const bool mask = chooses && k + 1 == touched.size();
      if (all_defined(operand.span.at, touched[k].second)) continue;
      for (int64_t n = 0; n < i.count; ++n) {
        const auto [first, size] = mask ? std::pair<int64_t, int64_t>{n / 8, 1} : lane_of(i, k, n);
        const uint8_t* shadow = &shadow_[operand.span.at + first];
        bool fine = true;
        for (int b = 0; b < size; ++b) fine &= mask ? (shadow[0] >> (n % 8) & 1) != 0 : shadow[b] == defined;
        // A lane of Select is what was chosen.
        if (chooses && !mask) {
          const bool first_chosen = memory<uint8_t>(i.sources[2])[n / 8] >> (n % 8) & 1;
          fine |= first_chosen != (k == 0);
        }
        if (!fine) lanes_[n] = 0;
      }
    }
    const std::vector<uint8_t> bits = defined_bits(i);
    run_op(i);
    mark(i);
    std::copy(bits.begin(), bits.end(), shadow_.begin() + i.target.span.at);
  }

  // Of masks put together, every bit is its own: which ones are defined.
  std::vector<uint8_t> defined_bits(const Instruction& i) const {
    std::vector<uint8_t> bits;
    if ((i.op != Op::bit_and && i.op != Op::bit_or) || i.block_step != dense) return bits;
    const auto *one = &shadow_[i.sources[0].span.at], *other = &shadow_[i.sources[1].span.at];
    for (int64_t n = 0; n < write_bytes(i); ++n) bits.push_back(one[n] & other[n]);
    return bits;
  }

  void mark(const Instruction& i) {
    uint8_t* shadow = &shadow_[i.target.span.at];
    if (i.op == Op::compare || i.op == Op::compare_scalar) {
      for (int64_t n = 0; n < i.count; n += 8) {
        uint8_t bits = 0;
        for (int b = 0; b < 8; ++b) bits |= static_cast<uint8_t>((n + b < i.count && lanes_[n + b]) << b);
        shadow[n / 8] = bits;
      }
      return;
    }
    const int size = bytes_of(i.target.type);
    uint8_t together = defined;
    for (int64_t n = 0; n < i.count; ++n) together &= lanes_[n];
    if (together == defined) {
      std::fill_n(shadow, i.count * size, defined);
    } else {
      for (int64_t n = 0; n < i.count; ++n) std::fill_n(shadow + n * size, size, lanes_[n]);
    }
  }

  void run_op(const Instruction& i);
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

  const Setting& setting_;
  Counts& counts_;
  int index_;
  uint64_t random_;
  std::vector<uint8_t> ub_, shadow_, lanes_;
  int64_t used_ = 0;
  bool waited_ = true;  // the next vector instruction is the first after a barrier or a flag
  std::vector<Buffer> buffers_;
  std::vector<Queue> queues_;
  std::map<FlagKey, int> events_;
  std::map<FlagKey, bool> allocated_;
  std::map<FlagKey, Flag> flags_;
  std::array<Clock, pipes> clocks_{};
  std::array<int64_t, pipes> issued_{};
  std::deque<Instruction> queue_[pipes];
  Ranges ub_ranges_, gm_ranges_;
};

// --- the arithmetic, one operation at a time
// ---------------------------------------------------------------------------

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

enum Round { none, rint, floor, ceil, away, trunc };  // RoundMode's order

float to_integer(float x, int mode) {
  switch (mode) {
    case rint: return std::nearbyint(x);
    case floor: return std::floor(x);
    case ceil: return std::ceil(x);
    case away: return std::round(x);
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
    case rint: return rest > half || (rest == half && odd);
    case away: return rest >= half;
    case floor: return negative && rest;
    case ceil: return !negative && rest;
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
  if (mode == rint || mode == none || x != x || std::isinf(x)) return u;
  const float magnitude = std::fabs(x);
  auto below = static_cast<uint16_t>(u & 0x7fff);
  if (from_f16(below) > magnitude) below -= 1;
  const double low = from_f16(below), high = below == 0x7bff ? 65536.0 : from_f16(static_cast<uint16_t>(below + 1));
  const double rest = magnitude - low, half = (high - low) / 2;
  const uint32_t quarters = rest == 0 ? 0 : rest < half ? 1 : rest == half ? 2 : 3;
  return static_cast<uint16_t>((u & 0x8000) | (below + goes_up(quarters, 4, below & 1, std::signbit(x), mode)));
}

bool is_integer(Type type) { return type == Type::i32 || type == Type::i16; }

// The documented combinations that the emulator knows; everything else is refused.
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
    case Op::duplicate: return target != Type::u8;
    case Op::index: return same && (target == Type::i32 || target == Type::f32);
    case Op::compare:
    case Op::compare_scalar:
      return target == Type::u8 && (source == Type::f32 || (source == Type::i32 && i.mode == 2));  // EQ
    case Op::select:
    case Op::select_scalar: return same && target == Type::f32 && i.sources[2].type == Type::u8;
    case Op::broadcast: return same && bytes_of(target) == 4;
    case Op::reduce_max: return same && target == Type::f32;
    case Op::cast: {
      const bool rounds = i.mode != none;
      if (source == Type::f32) {
        return rounds && (target == Type::bf16 || target == Type::f16 || target == Type::f32 || target == Type::i32 ||
                          target == Type::i16);
      }
      if (target == Type::u8) return rounds && source == Type::f16;
      if (target == Type::f16) return source == Type::i16 || (source == Type::u8 && i.mode == none);
      if (target == Type::i16) return source == Type::i32 ? i.mode == none : rounds && source == Type::f16;
      if (target == Type::f32) {
        return source == Type::i32
                   ? i.mode == rint
                   : i.mode == none && (source == Type::bf16 || source == Type::f16 || source == Type::i16);
      }
      return false;
    }
    default: return true;
  }
}

}  // namespace

// to[k] = f(a[k], b[k], k)
template <class T, class F>
void Core::each_lane(const Instruction& i, const F& f) {
  T* to = memory<T>(i.target);
  const T* a = memory<T>(i.sources[0]);
  const T* b = memory<T>(i.sources[1]);
  const int64_t period = i.block_step == dense ? i.count : block / static_cast<int64_t>(sizeof(T));
  for (int64_t start = 0; start < i.count; start += period) {
    const T* other = i.block_step == dense ? b : b + block_at(i, start) * period;
    for (int64_t k = 0; k < period; ++k) to[start + k] = f(a[start + k], other[k], start + k);
  }
}

template <class T>
void Core::arithmetic(const Instruction& i) {
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
void Core::bits(const Instruction& i) {
  switch (i.op) {
    case Op::bit_and: return each_lane<T>(i, [](T x, T y, int64_t) { return static_cast<T>(x & y); });
    case Op::bit_or: return each_lane<T>(i, [](T x, T y, int64_t) { return static_cast<T>(x | y); });
    default: return each_lane<T>(i, [](T x, T, int64_t) { return static_cast<T>(~x); });
  }
}

template <class T>
void Core::shift(const Instruction& i) {
  T* to = memory<T>(i.target);
  const T* a = memory<T>(i.sources[0]);
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
void Core::compare(const Instruction& i) {
  uint8_t* to = memory<uint8_t>(i.target);
  const T* a = memory<T>(i.sources[0]);
  const T* b = memory<T>(i.sources[1]);
  const bool scalar = i.op == Op::compare_scalar;
  for (int64_t k = 0; k < i.count; ++k) {
    const T x = a[k], y = scalar ? static_cast<T>(i.number) : b[k];
    const bool results[] = {x<y, x> y, x == y, x <= y, x >= y, x != y};  // CMPMODE's order
    const auto bit = static_cast<uint8_t>(1 << (k % 8));
    to[k / 8] = static_cast<uint8_t>(results[i.mode] ? to[k / 8] | bit : to[k / 8] & ~bit);
  }
}

void Core::cast(const Instruction& i) {
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
    const float* from = memory<float>(source);
    switch (i.target.type) {
      case Type::bf16:
        return each(memory<uint16_t>(i.target), from, [&](float x, int64_t) { return to_bf16(x, i.mode); });
      case Type::f16:
        return each(memory<uint16_t>(i.target), from, [&](float x, int64_t) { return to_f16(x, i.mode); });
      case Type::f32:
        return each(memory<float>(i.target), from, [&](float x, int64_t) { return to_integer(x, i.mode); });
      case Type::i32: return fitting(memory<int32_t>(i.target), from, same);
      default: return fitting(memory<int16_t>(i.target), from, same);
    }
  }
  if (i.target.type == Type::u8) {
    return each(memory<uint8_t>(i.target), memory<uint16_t>(source), [&](uint16_t u, int64_t k) {
      const float whole = to_integer(from_f16(u), i.mode);
      if (!(whole >= 0 && whole <= 255)) {
        lanes_[k] = 0;
        return uint8_t{0};
      }
      return static_cast<uint8_t>(whole);
    });
  }
  if (i.target.type == Type::i16) {
    int16_t* to = memory<int16_t>(i.target);
    return source.type == Type::i32 ? fitting(to, memory<int32_t>(source), same)
                                    : fitting(to, memory<uint16_t>(source), from_f16);
  }
  if (i.target.type == Type::f16 && source.type == Type::i16) {
    return each(memory<uint16_t>(i.target), memory<int16_t>(source),
                [&](int16_t x, int64_t) { return to_f16(x, i.mode); });
  }
  if (source.type == Type::u8) {
    return each(memory<uint16_t>(i.target), memory<uint8_t>(source),
                [](uint8_t x, int64_t) { return to_f16(x, none); });
  }
  float* to = memory<float>(i.target);
  switch (source.type) {
    case Type::bf16:
      return each(to, memory<uint16_t>(source), [](uint16_t u, int64_t) { return number(uint32_t{u} << 16); });
    case Type::f16: return each(to, memory<uint16_t>(source), [](uint16_t u, int64_t) { return from_f16(u); });
    case Type::i32: return each(to, memory<int32_t>(source), [](int32_t x, int64_t) { return static_cast<float>(x); });
    default: return each(to, memory<int16_t>(source), [](int16_t x, int64_t) { return static_cast<float>(x); });
  }
}

void Core::run_op(const Instruction& i) {
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
      auto* to = memory<uint32_t>(i.target);
      const auto *a = memory<uint32_t>(i.sources[0]), *b = memory<uint32_t>(i.sources[1]);
      const auto* mask = memory<uint8_t>(i.sources[2]);
      const uint32_t scalar = pattern(static_cast<float>(i.number));
      for (int64_t k = 0; k < i.count; ++k) {
        to[k] = mask[k / 8] >> (k % 8) & 1 ? a[k] : (i.op == Op::select ? b[k] : scalar);
      }
      return;
    }
    case Op::broadcast: {
      auto* to = memory<uint32_t>(i.target);
      const auto* from = memory<uint32_t>(i.sources[0]);
      for (int64_t k = 0; k < i.count; ++k) to[k] = from[k / 8];
      return;
    }
    case Op::reduce_max: {
      constexpr int64_t lanes = repeat / sizeof(float);
      auto* to = memory<float>(i.target);
      const auto* from = memory<float>(i.sources[0]);
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
          memory<float>(i.target)[k] = static_cast<float>(value);
        } else if (bytes_of(type) == 4) {
          memory<uint32_t>(i.target)[k] = static_cast<uint32_t>(static_cast<int64_t>(value));
        } else {
          memory<uint16_t>(i.target)[k] = static_cast<uint16_t>(static_cast<int64_t>(value));
        }
      }
      return;
    default:
      return type == Type::f32   ? arithmetic<float>(i)
             : type == Type::i32 ? arithmetic<int32_t>(i)
                                 : arithmetic<int16_t>(i);
  }
}

// --- the calls of kernel_operator.h
// --------------------------------------------------------------------------------------

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
  const Operand* sources[] = {&first, &second};
  for (const Operand* source : sources) {
    const int size = bytes_of(source->type), wide = bytes_of(target.type);
    const bool meet = source->span.bytes && source->span.at < target.span.at + count * wide &&
                      target.span.at < source->span.at + count * size;
    const bool read = op != Op::duplicate && op != Op::index &&
                      (source == &first || op <= Op::bit_or || op == Op::select || op == Op::select_scalar);
    if (read && meet && (source->span.at != target.span.at || size != wide)) {
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

void vector_with_block(Op op, Site site, Operand target, Operand first, Operand blocks, int64_t count, int step) {
  Instruction i{op, V, site, target, {first, blocks, {}}};
  i.block_step = step;
  issue_known(i, count);
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
void set_flag(Site site, Pipe from, Pipe to, int id) { running->explicit_set(site, from, to, id); }
void wait_flag(Site site, Pipe from, Pipe to, int id) { running->explicit_wait(site, from, to, id); }
void barrier(Site site, int pipe) { running->barrier(site, pipe); }
int new_event(Site site, Pipe from, Pipe to) { return running->new_event(site, from, to); }
int new_queue(Site site, int position, int depth, int buffers, int64_t bytes) {
  return running->add_queue(site, position, depth, buffers, bytes);
}
Span alloc(Site site, int queue) { return running->alloc(site, queue); }
void enque(Site site, int queue, Span span) { running->enque(site, queue, span); }
Span deque(Site site, int queue) { return running->deque(site, queue); }
void release(Site site, int queue, Span span) { running->release(site, queue, span); }
Span new_buffer(Site site, int64_t bytes) { return running->add_buffer(site, bytes, -1); }
int64_t block_index() { return running->index(); }
int64_t block_count() { return blocks_running; }

// --- a launch
// ------------------------------------------------------------------------------------------------------------

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
