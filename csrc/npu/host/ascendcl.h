// What is used of libascendcl, found when it is first needed: the extension is linked against nothing of CANN.
// Names, signatures and numbers are those of the documented C API.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npuzero::npu {

constexpr int huge_pages_first = 0;                    // aclrtMemMallocPolicy
constexpr int host_to_device = 1, device_to_host = 2;  // aclrtMemcpyKind

struct AscendCl {
  int (*aclrtGetDevice)(int32_t* device);
  int (*aclGetDeviceCapability)(uint32_t device, int fact, int64_t* value);
  int (*aclrtMalloc)(void** memory, size_t bytes, int policy);
  int (*aclrtMallocHost)(void** memory, size_t bytes);
  int (*aclrtFree)(void* memory);
  int (*aclrtFreeHost)(void* memory);
  int (*aclrtMemcpyAsync)(void* target, size_t room, const void* source, size_t bytes, int kind, void* stream);
  int (*aclrtCreateEventExWithFlag)(void** event, uint32_t flag);
  int (*aclrtRecordEvent)(void* event, void* stream);
  int (*aclrtQueryEventStatus)(void* event, int* status);
  int (*aclrtSynchronizeStream)(void* stream);
  const char* (*aclGetRecentErrMsg)();
  int (*aclmdlRICaptureGetInfo)(void* stream, int* status, void** graph);  // null where CANN captures no streams
};

// Error::KernelUnavailable where there is no libascendcl, or one that lacks some of it.
const AscendCl& ascendcl();

// Error::State where `result` is not success: says which call of CANN's failed, and what CANN says of it.
void check(int result, const char* call);

// The function `name` of the shared object `library`, loaded on the way. `purpose` and `remedy` are for the error,
// Error::KernelUnavailable.
void* find(const char* library, const char* name, const char* purpose, const char* remedy);

}  // namespace npuzero::npu
