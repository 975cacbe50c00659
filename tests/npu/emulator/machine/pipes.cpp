#include "machine/pipes.h"

#include <cstring>

#include "machine/vector.h"

namespace emulator {

constexpr size_t queue_length = 48;  // instructions that a pipe takes before the scalar unit waits for it

Pipes::Pipes(const Setting& setting, Ub& ub, int core) : setting_(setting), ub_(ub) {
  random_ = static_cast<uint64_t>(setting.seed) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(core) + 1;
}

template <class Body>
void Pipes::eager(const Body& body, Pipe first, Pipe second) {
  for (size_t before = 0, after = queued(); before != after; after = queued()) {
    before = after;
    body(first);
    body(second);
  }
}

void Pipes::push(const Instruction& instruction) {
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

void Pipes::await(const FlagKey& flag) {
  while (fired_[flag] < 1) advance(static_cast<Pipe>(flag[0]));
  fired_[flag] -= 1;
}

bool Pipes::ready(Pipe pipe) {
  if (queue_[pipe].empty()) return false;
  const Instruction& head = queue_[pipe].front();
  return head.op != Op::wait_flag || fired_[head.flag] > 0;
}

// The head of a pipe; in the random schedule one of those that are in flight together.
void Pipes::step(Pipe pipe) {
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
void Pipes::advance(Pipe pipe) {
  while (!ready(pipe)) {
    if (queue_[pipe].empty()) refuse({"the schedule", 0}, "flag", "everything waits");
    advance(static_cast<Pipe>(queue_[pipe].front().flag[0]));
  }
  step(pipe);
}

void Pipes::drain() {
  for (Pipe pipe : {MTE2, V, MTE3}) {
    while (!queue_[pipe].empty()) advance(pipe);
  }
}

uint64_t Pipes::draw(uint64_t below) {
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  return (random_ >> 33) % below;
}

void Pipes::execute(const Instruction& i) {
  switch (i.op) {
    case Op::set_flag: fire(i.flag, 1); return;
    case Op::wait_flag: fire(i.flag, -1); return;
    case Op::release: ub_.forget(i.target.span, 0, i.target.span.bytes); return;
    case Op::load:
      ub_.write(i.target.span, i.global, i.bytes);
      ub_.forget(i.target.span, i.bytes, i.pad);
      return;
    case Op::store:
      if (!ub_.all_defined(i.sources[0].span, i.bytes)) {
        refuse(i.site, "poison", "what is stored was never computed, or is undefined on the device");
      }
      std::memcpy(i.global, ub_.at<uint8_t>(i.sources[0]), i.bytes);
      return;
    default: compute(i, ub_);
  }
}

}  // namespace emulator
