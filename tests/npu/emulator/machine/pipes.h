// The three pipes: instructions in flight, and the order in which a schedule has them happen.
#pragma once

#include <deque>
#include <map>

#include "machine/ub.h"
#include "run.h"

namespace emulator {

class Pipes {
 public:
  Pipes(const Setting& setting, Ub& ub, int core);

  void push(const Instruction& instruction);
  void drain();

  // Flags at execution: how often one was set, less how often it was waited for.
  void fire(const FlagKey& flag, int by) { fired_[flag] += by; }
  void await(const FlagKey& flag);  // runs the pipe that sets it until it has

 private:
  template <class Body>
  void eager(const Body& body, Pipe first, Pipe second);
  size_t queued() const { return queue_[V].size() + queue_[MTE2].size() + queue_[MTE3].size(); }
  bool ready(Pipe pipe);
  void step(Pipe pipe);
  void advance(Pipe pipe);
  uint64_t draw(uint64_t below);
  void execute(const Instruction& i);

  const Setting& setting_;
  Ub& ub_;
  uint64_t random_;
  std::deque<Instruction> queue_[pipes];
  std::map<FlagKey, int> fired_;
};

}  // namespace emulator
