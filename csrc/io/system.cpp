#include "io/system.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <optional>
#include <vector>

namespace npuzero::io {
namespace {

std::atomic<bool> armed{false};
std::mutex mutex;
std::vector<Fault> faults;

// The fault that this call meets.
std::optional<Fault> met(Call call) {
  if (!armed.load(std::memory_order_relaxed)) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex);
  for (Fault& fault : faults) {
    if (fault.call != call || fault.times == 0) continue;
    if (fault.after > 0) {
      --fault.after;
    } else {
      if (fault.times > 0) --fault.times;
      return fault;
    }
  }
  return std::nullopt;
}

bool fails(Call call) {
  const std::optional<Fault> fault = met(call);
  if (!fault || fault->error == 0) return false;
  errno = fault->error;
  return true;
}

}  // namespace

void inject(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex);
  faults.push_back(fault);
  armed = true;
}

void heal() {
  const std::lock_guard<std::mutex> lock(mutex);
  faults.clear();
  armed = false;
}

int open_nameless(const std::string& folder) {
  return fails(Call::nameless) ? -1 : ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
}

int make_direct(int file) {
  if (fails(Call::direct)) return -1;
  const int flags = ::fcntl(file, F_GETFL);
  return flags < 0 ? -1 : ::fcntl(file, F_SETFL, flags | O_DIRECT);
}

int allocate(int file, int64_t bytes) {
  if (fails(Call::allocate)) return -1;
  errno = ::posix_fallocate(file, 0, bytes);
  return errno == 0 ? 0 : -1;
}

ssize_t read_at(int file, void* data, size_t bytes, int64_t offset) {
  const std::optional<Fault> fault = met(Call::read);
  if (!fault) return ::pread(file, data, bytes, offset);
  if (fault->error != 0) {
    errno = fault->error;
    return -1;
  }
  const ssize_t moved = ::pread(file, data, std::min(bytes, fault->most), offset);
  if (fault->flip && moved > 0) static_cast<unsigned char*>(data)[moved / 2] ^= 1;
  return moved;
}

ssize_t write_at(int file, const void* data, size_t bytes, int64_t offset) {
  const std::optional<Fault> fault = met(Call::write);
  if (!fault) return ::pwrite(file, data, bytes, offset);
  if (fault->error != 0) {
    errno = fault->error;
    return -1;
  }
  return ::pwrite(file, data, std::min(bytes, fault->most), offset);
}

}  // namespace npuzero::io
