// Part of libascendcl.so for tests: pinned memory of the host. The device addresses it only where it is registered, and
// at another address than the host: what is handed the host's reads what the device does not have.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "device.h"

FAKE_API int aclrtSynchronizeDevice();

namespace {

constexpr size_t page = 4096;

std::mutex mutex;
// Pinned memory of the host, by its begin; and what of it the device addresses, by its begin on the host.
struct Pinned {
  size_t bytes;
  int file;
};
struct Registered {
  uintptr_t begin;
  size_t bytes;
};
std::map<uintptr_t, Pinned> pinned;
std::map<uintptr_t, Registered> registered;

void* mapped_from(int file, off_t offset, size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
}

}  // namespace

std::map<uintptr_t, size_t> fake::registered() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::map<uintptr_t, size_t> all;
  for (const auto& [host, there] : ::registered) all[there.begin] = there.bytes;
  return all;
}

FAKE_API int aclrtMallocHost(void** out, size_t bytes) {
  const size_t rounded = (bytes + page - 1) / page * page;
  const int file = memfd_create("pinned", 0);
  void* memory =
      file < 0 || ftruncate(file, static_cast<off_t>(rounded)) != 0 ? MAP_FAILED : mapped_from(file, 0, rounded);
  if (memory == MAP_FAILED) return fake::fail(fake::out_of_memory, "aclrtMallocHost");
  const std::lock_guard<std::mutex> lock(mutex);
  pinned[reinterpret_cast<uintptr_t>(memory)] = {rounded, file};
  *out = memory;
  return fake::success;
}
FAKE_API int aclrtFreeHost(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = pinned.find(reinterpret_cast<uintptr_t>(memory));
  if (found == pinned.end()) return fake::invalid_param;
  munmap(memory, found->second.bytes);
  close(found->second.file);
  pinned.erase(found);
  return fake::success;
}
// type 0: mapped. The device has it at another address than the host.
FAKE_API int aclrtHostRegister(void* memory, uint64_t bytes, int type, void** out) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  if (type != 0 || !out || address % page || bytes % page) {
    return fake::fail(fake::invalid_param, "aclrtHostRegister: type, or no whole pages");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = pinned.upper_bound(address);
  if (found == pinned.begin() || address + bytes > (--found)->first + found->second.bytes) {
    return fake::fail(fake::invalid_param, "aclrtHostRegister: memory that is not pinned");
  }
  if (registered.count(address)) return fake::fail(fake::invalid_param, "aclrtHostRegister: registered already");
  *out = mapped_from(found->second.file, static_cast<off_t>(address - found->first), bytes);
  registered[address] = {reinterpret_cast<uintptr_t>(*out), bytes};
  return fake::success;
}
FAKE_API int aclrtHostUnregister(void* memory) {
  aclrtSynchronizeDevice();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = registered.find(reinterpret_cast<uintptr_t>(memory));
  if (found == registered.end()) return fake::invalid_param;
  munmap(reinterpret_cast<void*>(found->second.begin), found->second.bytes);
  registered.erase(found);
  return fake::success;
}
