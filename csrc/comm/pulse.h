// Pulse: whether another process still lives. A zombie is dead.
#pragma once

#include <sys/types.h>

namespace npuzero::comm {

class Pulse {
 public:
  explicit Pulse(pid_t pid);  // pid 0: a thread of this process, which is never found dead
  Pulse(Pulse&& other) noexcept;
  Pulse(const Pulse&) = delete;
  ~Pulse();

  bool dead() const;

 private:
  pid_t pid_;
  int fd_ = -1;        // pidfd: immune to a reused pid
  bool gone_ = false;  // it was dead before we looked
};

}  // namespace npuzero::comm
