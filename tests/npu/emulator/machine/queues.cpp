#include "machine/queues.h"

namespace emulator {

constexpr int outstanding = 8;  // tensors of one position

int Queues::add(Site site, int position, int depth, int buffers, int64_t bytes) {
  if (depth < 1 || buffers < 1) refuse(site, "queue", "a queue without places");
  queues_.push_back({position, depth, {}, {}, 0});
  const int queue = static_cast<int>(queues_.size()) - 1;
  Queue& q = queues_.back();
  for (int i = 0; i < buffers; ++i) {
    ub_.add_buffer(site, bytes, queue);
    q.buffers.push_back(static_cast<int>(ub_.buffers().size()) - 1);
    order_.new_event(site, q.filler(), q.drainer(), true);
    order_.new_event(site, q.drainer(), q.filler(), true);
  }
  return queue;
}

Span Queues::alloc(Site site, int queue) {
  Queue& q = queues_.at(queue);
  int busy = 0;
  for (const Buffer& buffer : ub_.buffers()) {
    busy += buffer.queue >= 0 && queues_[buffer.queue].position == q.position && buffer.state != State::free;
  }
  if (busy >= outstanding) refuse(site, "queue", "more than 8 tensors outstanding of one position");
  for (size_t i = 0; i < q.buffers.size(); ++i) {
    const int index = q.buffers[(q.turn + i) % q.buffers.size()];
    Buffer& buffer = ub_.buffers()[index];
    if (buffer.state != State::free) continue;
    q.turn = (q.turn + i + 1) % q.buffers.size();
    if (buffer.used_before) order_.wait(site, q.drainer(), q.filler(), queue_ids + index, false);
    buffer.state = State::held;
    return buffer.span;
  }
  refuse(site, "queue", "AllocTensor, and every buffer is in use: one was not freed");
}

void Queues::enque(Site site, int queue, Span span) {
  Queue& q = queues_.at(queue);
  const int index = ub_.buffer_at(site, span);
  Buffer& buffer = ub_.buffers()[index];
  if (order_.dropped(site, Drop::all)) return;
  if (buffer.queue != queue || buffer.state != State::held) {
    refuse(site, "queue", "EnQue of a tensor that was not allocated from this queue");
  }
  if (static_cast<int>(q.fifo.size()) == q.depth) refuse(site, "queue", "EnQue beyond the queue's depth");
  buffer.state = State::queued;
  q.fifo.push_back(index);
  order_.set(site, q.filler(), q.drainer(), queue_ids + index, true);
}

Span Queues::deque(Site site, int queue) {
  Queue& q = queues_.at(queue);
  if (q.fifo.empty()) refuse(site, "queue", "DeQue of an empty queue");
  const int index = q.fifo.front();
  Buffer& buffer = ub_.buffers()[index];
  if (order_.dropped(site, Drop::all)) return buffer.span;
  q.fifo.pop_front();
  buffer.state = State::out;
  order_.wait(site, q.filler(), q.drainer(), queue_ids + index, true);
  return buffer.span;
}

void Queues::release(Site site, int queue, Span span) {
  const Queue& q = queues_.at(queue);
  const int index = ub_.buffer_at(site, span);
  Buffer& buffer = ub_.buffers()[index];
  if (order_.dropped(site, Drop::all)) return;
  if (buffer.queue != queue || buffer.state != State::out) {
    refuse(site, "queue", "FreeTensor of a tensor that did not come out of this queue");
  }
  buffer.state = State::free;
  buffer.used_before = true;
  Instruction instruction{Op::release, q.drainer(), site, {}, {}};
  instruction.target.span = buffer.span;
  pipes_.push(instruction);
  order_.set(site, q.drainer(), q.filler(), queue_ids + index, false);
}

void Queues::check_freed(Site site) const {
  for (const Buffer& buffer : ub_.buffers()) {
    if (buffer.queue >= 0 && buffer.state != State::free) refuse(site, "queue", "a tensor was not freed");
  }
}

}  // namespace emulator
