// The fake device's inside, which libhccl shares with libascendcl: streams that take work, and whose memory is whose.
// Written from the documented C API (names, signatures, meanings); nothing of CANN is in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace fake {

// Results of the documented C API.
enum Result : int {
  success = 0,
  invalid_param = 107000,
  invalid_handle = 107017,
  out_of_memory = 207001,
  unsupported = 207000,
  task_failed = 507015,  // of work on a stream, found out at a synchronization
};

enum Memory { host, device };

// Runs on the stream's thread, after what was put there before. A text it throws (std::runtime_error) is the stream's
// error, which every later synchronization returns.
__attribute__((visibility("default"))) void enqueue(void* stream, std::function<void()> task);

// Whether [begin, begin + bytes) lies in one allocation of device memory.
__attribute__((visibility("default"))) bool on_device(const void* begin, size_t bytes);

// What kernels may address, device memory and registered memory of the host: begin and bytes of each allocation.
__attribute__((visibility("default"))) std::map<uintptr_t, size_t> allocations();

// What of the host's memory kernels may address: begin, for them, and bytes.
__attribute__((visibility("default"))) std::map<uintptr_t, size_t> registered();

// Sets what aclGetRecentErrMsg tells, and returns `result`.
__attribute__((visibility("default"))) int fail(int result, const std::string& text);

}  // namespace fake
