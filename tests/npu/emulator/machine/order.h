// Flags and barriers at issue: what each pipe has waited for, whatever happens when.
#pragma once

#include <array>
#include <map>

#include "machine/pipes.h"
#include "machine/ranges.h"

namespace emulator {

constexpr int queue_ids = 16;  // flags from here on belong to queues

class Order {
 public:
  Order(const Setting& setting, Pipes& queued) : setting_(setting), pipes_(queued) {}

  int new_event(Site site, Pipe from, Pipe to, bool of_queue = false);
  void explicit_set(Site site, Pipe from, Pipe to, int id);
  void explicit_wait(Site site, Pipe from, Pipe to, int id);
  void set(Site site, Pipe from, Pipe to, int id, bool notes);
  void wait(Site site, Pipe from, Pipe to, int id, bool notes);
  void barrier(Site site, int pipe);
  void check_flags(Site site) const;  // a fault where one is still set

  bool dropped(Site site, Drop how) const { return setting_.drop == how && setting_.dropped == at(site); }

  int64_t issue(Pipe pipe) { return ++issued_[pipe]; }  // the number of a new instruction
  int64_t scalar_step() { return clocks_[S].seen[S] = issue(S); }
  int64_t issued(Pipe pipe) const { return issued_[pipe]; }
  Clock clock(Pipe pipe) const;  // what is over before whatever a pipe is given now
  bool first_after_wait();       // whether this vector instruction is the first after a barrier or a flag

 private:
  struct Flag {
    bool set = false;
    Clock clock;
  };

  void note(Site site, const char* what) const { setting_.sites[{at(site), what}] += 1; }

  const Setting& setting_;
  Pipes& pipes_;
  std::map<FlagKey, int> events_;
  std::map<FlagKey, bool> allocated_;
  std::map<FlagKey, Flag> flags_;
  std::array<Clock, pipes> clocks_{};
  std::array<int64_t, pipes> issued_{};
  bool waited_ = true;
};

}  // namespace emulator
