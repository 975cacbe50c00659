// Peers: what one rank says to the others of its group, what it waits for, and why it does not wait for ever.
//
// A rank says how many rounds it has filled and read (its counters); the others wait for that. Who waits looks again for
// a while, if that is likely to be short or costs nobody anything, and then sleeps until it is rung. Each sleep ends some
// times a second, to look whether the peers still live.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/pulse.h"
#include "comm/request.h"

namespace npuzero::comm {

using Clock = std::chrono::steady_clock;

constexpr int slice_ms = 50;  // a sleeping rank looks this often whether its peers live

class Peers {
 public:
  Peers(const Group& group, double timeout_s);

  // One operation: from what this rank will do, and where its buffer can be read, to its end.
  void begin(const Request& request, uint64_t sequence, const Window& window);
  void compare_signatures();  // once all have begun
  void finish();
  void abandon();  // after a failure

  void post(uint64_t rounds);
  void consume(uint64_t rounds);
  void await(Counter kind, int peer, uint64_t target);
  void await_all(Counter kind, uint64_t target);

  const Signature& signature() const { return signature_; }
  bool dead(int peer) const { return pulses_[peer].dead(); }
  std::string whereabouts(int awaited) const;
  [[noreturn]] void fail(const std::string& kind, const std::string& expected, const std::string& got,
                         const std::string& remedy);

  // Set by the communicator's other threads.
  std::atomic<bool> closing{false};
  std::atomic<int> waiters{0};     // threads that do nothing but wait for an operation
  std::atomic<uint64_t> looks{0};  // waits that began by looking again
  // Asked some times a second by the thread that waits, where an operation runs on it; it breaks the group.
  const std::function<bool()>* interrupted = nullptr;

 private:
  bool worth_looking(int peer) const;
  void advance(std::atomic<uint64_t>& counter, uint64_t value, Counter kind);
  void check_trouble(Counter kind, uint64_t target, int awaited);
  std::atomic<uint64_t>& counter_of(Counter kind, int peer) const;

  const Group& group_;
  const double timeout_s_;
  std::vector<Pulse> pulses_;

  // of the operation that runs
  Signature signature_{};
  Clock::time_point deadline_;
};

}  // namespace npuzero::comm
