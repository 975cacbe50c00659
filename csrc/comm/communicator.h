// Communicator: one rank's door to collectives over a Region: a queue of operations, and who runs them.
//
// Operations run in the order of submission, on the progress thread or, where that is not busy, on the thread that
// waits. Neither needs Python. What an operation does is in verbs.h, and how ranks wait for each other in peers.h.
//
// After a failure the communicator is broken: the region keeps the first failure, and every later operation has it.
//
// A forked child has a copy whose thread is gone and whose locks may be held for ever: there every call but close is an
// Error::State, and nothing is destroyed (InItsProcess).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "comm/peers.h"
#include "comm/request.h"
#include "comm/verbs.h"

namespace npuzero::comm {

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

  void abort(const Failure& why);          // breaks it for all ranks
  void close();                            // operations that are not done fail; idempotent; nothing in a forked child
  std::optional<Failure> failure() const;  // why it takes no operation any more: the first failure of any rank
  bool inherited() const { return group_.region->inherited(); }
  int size() const { return group_.size; }
  uint64_t looks() const { return peers_.looks.load(std::memory_order_relaxed); }

 private:
  void check_process() const;
  void run_front(std::unique_lock<std::mutex>& lock);
  void progress();

  const Group group_;
  Peers peers_;
  Verbs verbs_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OperationPointer> queue_;
  uint64_t submitted_ = 0;
  bool busy_ = false;
  std::thread thread_;
};

// Destroys a communicator in the process that made it.
struct InItsProcess {
  void operator()(Communicator* communicator) const {
    if (!communicator->inherited()) delete communicator;
  }
};

}  // namespace npuzero::comm
