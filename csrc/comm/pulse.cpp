#include "comm/pulse.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same number on every architecture; older headers lack it
#endif

namespace npuzero::comm {
namespace {

// For kernels before 5.3 and sandboxes without pidfd_open.
bool dead_by_proc(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  std::string line;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  if (!std::getline(stat, line)) return false;
  const size_t end = line.rfind(')');  // the name before it may hold anything
  return end != std::string::npos && end + 2 < line.size() && (line[end + 2] == 'Z' || line[end + 2] == 'X');
}

}  // namespace

Pulse::Pulse(pid_t pid) : pid_(pid) {
  if (pid_ == 0) return;
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  gone_ = fd_ < 0 && errno == ESRCH;
}

Pulse::Pulse(Pulse&& other) noexcept : pid_(other.pid_), fd_(std::exchange(other.fd_, -1)), gone_(other.gone_) {}

Pulse::~Pulse() {
  if (fd_ >= 0) close(fd_);
}

bool Pulse::dead() const {
  if (pid_ == 0) return false;
  if (gone_) return true;
  if (fd_ < 0) return dead_by_proc(pid_);
  pollfd query{fd_, POLLIN, 0};
  return poll(&query, 1, 0) == 1 && (query.revents & POLLIN) != 0;
}

}  // namespace npuzero::comm
