// Queues of tensors: who holds which buffer of UB, and the flags between the pipes that fill and drain it.
#pragma once

#include <deque>
#include <vector>

#include "machine/order.h"

namespace emulator {

class Queues {
 public:
  Queues(Ub& ub, Order& order, Pipes& queued) : ub_(ub), order_(order), pipes_(queued) {}

  int add(Site site, int position, int depth, int buffers, int64_t bytes);
  Span alloc(Site site, int queue);
  void enque(Site site, int queue, Span span);
  Span deque(Site site, int queue);
  void release(Site site, int queue, Span span);
  void check_freed(Site site) const;

 private:
  struct Queue {
    int position, depth;
    std::vector<int> buffers;
    std::deque<int> fifo;
    size_t turn = 0;
    Pipe filler() const { return position == 0 ? MTE2 : V; }
    Pipe drainer() const { return position == 0 ? V : MTE3; }
  };

  Ub& ub_;
  Order& order_;
  Pipes& pipes_;
  std::vector<Queue> queues_;
};

}  // namespace emulator
