// Communicator: one rank's door to collectives over a Region.
//
// Every verb is a sequence of rounds. In round t each rank fills its own slot t % 2 ("posted"), then reads the slots of
// the others ("consumed"); it fills round t + 1 before it reads round t, so copying in and copying out overlap between
// ranks. A slot is filled again once all peers have consumed its last round. In the first round of an operation all
// ranks wait for all, and compare what each said it would do (its Signature), before anything is read.
//
// In place: a rank whose buffer its peers can reach (Window: it is in the process's Arena, or the ranks are threads)
// says where it is beside its signature, posts all rounds at once and fills no slot; the others read the buffer itself.
// Each rank's own buffer decides for itself. The operation ends on that rank once all peers have consumed. An
// all_reduce goes in place where all buffers can: each rank then sums its range of all of them into all of them.
//
// Operations run in the order of submission, on the progress thread or, where that is not busy, on the thread that
// waits. Neither needs Python.
//
// Invariants:
//   - round_ is equal on all ranks between operations, since operations of equal signature take equally many rounds
//   - sums run in ascending order of the global ranks, whatever the order of the group
//   - after a failure the communicator is broken: the region keeps the first failure, and every later operation has it
//
// A forked child has a copy whose thread is gone and whose locks may be held for ever: there every call but close is an
// Error::State, and nothing is destroyed (InItsProcess).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/pulse.h"
#include "comm/region.h"
#include "core/view.h"

namespace npuzero::comm {

enum class Verb : int { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier };
const char* name(Verb verb);

// One verb on one rank. `numel` counts the shard (all_gather, reduce_scatter, all_to_all: one rank's part) or the
// buffer. Memory must stay until the operation is done.
struct Request {
  Verb verb = Verb::barrier;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t numel = 0;
  size_t itemsize = 1;
  Dtype wire = Dtype::u8, result = Dtype::u8;  // of the verbs that sum
  bool accumulate = false;
  int root = 0;
  std::string dtype, tag;  // for the signature
};

using Clock = std::chrono::steady_clock;

class Communicator;

struct Operation {
  Request request;
  const Communicator* owner = nullptr;
  uint64_t sequence = 0;
  bool refused = false;          // failed before it was queued
  Clock::time_point begin, end;  // of its execution, once it is done
  bool done = false;             // under the communicator's mutex, like failure
  std::optional<Failure> failure;
};

using OperationPointer = std::shared_ptr<Operation>;

class Communicator {
 public:
  // ranks: global ranks in group order. pids: of the processes, in group order; empty where ranks are threads.
  Communicator(std::shared_ptr<Region> region, int index, std::vector<int> ranks, std::vector<int> pids,
               std::string name, double timeout_s);
  Communicator(const Communicator&) = delete;
  ~Communicator();

  OperationPointer submit(Request request);

  // Until the operation is done. `interrupted` is asked some times a second; where it says true, wait ends early with
  // false, and an operation that was running on this thread breaks the communicator.
  bool wait(const OperationPointer& operation, const std::function<bool()>& interrupted);
  bool done(const OperationPointer& operation);

  void abort(const Failure& why);  // breaks it for all ranks
  void close();                    // operations that are not done fail; idempotent; nothing in a forked child
  bool inherited() const { return region_->inherited(); }
  int size() const { return size_; }

 private:
  // submission
  void check_process() const;
  void run_front(std::unique_lock<std::mutex>& lock);
  void progress();

  // verbs
  void execute(Operation& operation);
  void all_gather(const Request& request);
  void reduce_scatter(const Request& request);
  void all_reduce_small(const Request& request);
  void all_reduce_large(const Request& request);
  void all_reduce_slots(const Request& request);
  void all_reduce_in_place(const Request& request);
  void all_to_all(const Request& request);
  void broadcast(const Request& request);
  template <class Fill, class Read>
  void rounds(uint64_t count, Fill fill, Read read);
  void meet();  // a round that carries nothing

  // The part of writer's slot that is meant for reader, where a slot holds one part per peer.
  std::byte* part(int writer, int reader, uint64_t round, size_t part_bytes) const;
  size_t part_numel(size_t itemsize) const;
  // In order of the global ranks: `own` at this rank, and what peer p meant for this rank elsewhere.
  template <class Theirs>
  const void* const* sources(const void* own, Theirs theirs);

  // in place
  Window window(const Request& request) const;
  void open_windows();
  void leave_peers_buffers();

  // waiting
  void sign(const Operation& operation);
  void compare_signatures();
  void post(uint64_t rounds);
  void consume(uint64_t rounds);
  void advance(std::atomic<uint64_t>& counter, uint64_t value, Counter kind);
  void await(Counter kind, int peer, uint64_t target);
  void await_all(Counter kind, uint64_t target);
  void check_trouble(Counter kind, uint64_t target, int awaited);
  std::atomic<uint64_t>& counter_of(Counter kind, int peer) const;
  std::string whereabouts(int awaited) const;
  [[noreturn]] void fail(const std::string& kind, const std::string& expected, const std::string& got,
                         const std::string& remedy);

  const std::shared_ptr<Region> region_;
  const int index_, size_;
  const std::vector<int> ranks_;
  const std::string name_;
  const double timeout_s_;
  std::vector<int> order_;  // positions in the group, by ascending global rank
  std::vector<Pulse> pulses_;
  std::vector<const void*> sources_;
  const bool threads_;
  const std::vector<int> pids_;
  std::vector<std::shared_ptr<Mapping>> mappings_;  // of the peers' arenas
  const bool crowded_;                              // more ranks than cores

  // of the operation that runs
  uint64_t round_ = 0;
  Signature signature_{};
  bool in_place_ = false;           // this rank's buffer is read where it is
  std::vector<std::byte*> theirs_;  // the peers' buffers, null where they come by slots
  bool reaches_ = false;            // some are not null
  Clock::time_point deadline_;
  const std::function<bool()>* interrupted_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OperationPointer> queue_;
  uint64_t submitted_ = 0;
  bool busy_ = false;
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

// Destroys a communicator in the process that made it.
struct InItsProcess {
  void operator()(Communicator* communicator) const {
    if (!communicator->inherited()) delete communicator;
  }
};

}  // namespace npuzero::comm
