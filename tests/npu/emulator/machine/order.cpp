#include "machine/order.h"

#include <algorithm>

namespace emulator {

constexpr int events = 6;  // of one kind, that a kernel may have

int Order::new_event(Site site, Pipe from, Pipe to, bool of_queue) {
  int& used = events_[{from, to, 0}];
  if (used == events) refuse(site, "flag", "more than 6 events of one kind");
  if (!of_queue) allocated_[{from, to, used}] = true;
  return used++;
}

void Order::explicit_set(Site site, Pipe from, Pipe to, int id) {
  if (!allocated_.count({from, to, id})) refuse(site, "flag", "SetFlag of an event that was not allocated");
  if (!dropped(site, Drop::all)) set(site, from, to, id, true);
}

void Order::explicit_wait(Site site, Pipe from, Pipe to, int id) {
  if (!allocated_.count({from, to, id})) refuse(site, "flag", "WaitFlag of an event that was not allocated");
  if (!dropped(site, Drop::all)) wait(site, from, to, id, true);
}

void Order::set(Site site, Pipe from, Pipe to, int id, bool notes) {
  note(site, !notes ? "FreeTensor" : id < queue_ids ? "SetFlag" : "EnQue");
  Flag& flag = flags_[{from, to, id}];
  if (flag.set) refuse(site, "flag", "a flag set twice, and not waited for between");
  flag.set = true;
  flag.clock = Clock{};
  if (dropped(site, Drop::order)) return pipes_.fire({from, to, id}, 1);
  flag.clock = clock(from);
  flag.clock.seen[from] = issued_[from];
  if (from == S) return pipes_.fire({from, to, id}, 1);
  Instruction instruction{Op::set_flag, from, site, {}, {}};
  instruction.flag = {from, to, id};
  pipes_.push(instruction);
}

void Order::wait(Site site, Pipe from, Pipe to, int id, bool notes) {
  note(site, !notes ? "AllocTensor" : id < queue_ids ? "WaitFlag" : "DeQue");
  Flag& flag = flags_[{from, to, id}];
  if (!flag.set) refuse(site, "flag", "a flag waited for that nobody has set");
  flag.set = false;
  if (dropped(site, Drop::order)) return pipes_.fire({from, to, id}, -1);
  clocks_[to].merge(flag.clock);
  if (to == V) waited_ = true;
  if (to == S) return pipes_.await({from, to, id});
  Instruction instruction{Op::wait_flag, to, site, {}, {}};
  instruction.flag = {from, to, id};
  pipes_.push(instruction);
}

void Order::barrier(Site site, int pipe) {
  note(site, "PipeBarrier");
  if (pipe < 0 || pipe == V) waited_ = true;
  if (dropped(site, Drop::all) || dropped(site, Drop::order)) return;
  if (pipe < 0) {
    pipes_.drain();
    Clock all;
    for (int p = 0; p < pipes; ++p) all.seen[p] = issued_[p];
    for (Clock& clock : clocks_) clock.merge(all);
  } else {
    clocks_[pipe].seen[pipe] = issued_[pipe];
    // Nothing to free: later instructions do not overtake it.
    pipes_.push(Instruction{Op::release, static_cast<Pipe>(pipe), site, {}, {}});
  }
}

void Order::check_flags(Site site) const {
  for (const auto& [key, flag] : flags_) {
    if (flag.set && key[2] < queue_ids) refuse(site, "flag", "a flag was set and never waited for");
  }
}

Clock Order::clock(Pipe pipe) const {
  Clock clock = clocks_[pipe];
  for (int p = 0; p < pipes; ++p) {  // issued after what the scalar unit has waited for
    if (p != S) clock.seen[p] = std::max(clock.seen[p], clocks_[S].seen[p]);
  }
  return clock;
}

bool Order::first_after_wait() {
  const bool first = waited_;
  waited_ = false;
  return first;
}

}  // namespace emulator
