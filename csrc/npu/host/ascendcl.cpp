#include "npu/host/ascendcl.h"

#include <dlfcn.h>

#include <string>

#include "core/check.h"

namespace npuzero::npu {

namespace {

void* look_up(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return handle ? dlsym(handle, name) : nullptr;
}

}  // namespace

void* find(const char* library, const char* name, const char* purpose, const char* remedy) {
  void* function = look_up(library, name);
  if (!function) {
    const char* why = dlerror();
    throw Error(Error::Kind::KernelUnavailable, purpose, std::string(name) + " in " + library,
                why ? why : "a null address", remedy);
  }
  return function;
}

const AscendCl& ascendcl() {
  static const AscendCl api = [] {
    AscendCl found = {};
    const auto assign = [](auto& function, void* at) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(at);
    };
    const auto take = [&](auto& function, const char* name) {
      assign(function, find("libascendcl.so", name, "device npu",
                            "Install CANN 8.3.RC1 or later, and source its set_env.sh before starting Python."));
    };
    take(found.aclrtGetDevice, "aclrtGetDevice");
    take(found.aclGetDeviceCapability, "aclGetDeviceCapability");
    take(found.aclrtMalloc, "aclrtMalloc");
    take(found.aclrtMallocHost, "aclrtMallocHost");
    take(found.aclrtFree, "aclrtFree");
    take(found.aclrtFreeHost, "aclrtFreeHost");
    take(found.aclrtMemcpyAsync, "aclrtMemcpyAsync");
    take(found.aclrtCreateEventExWithFlag, "aclrtCreateEventExWithFlag");
    take(found.aclrtRecordEvent, "aclrtRecordEvent");
    take(found.aclrtQueryEventStatus, "aclrtQueryEventStatus");
    take(found.aclrtSynchronizeStream, "aclrtSynchronizeStream");
    take(found.aclGetRecentErrMsg, "aclGetRecentErrMsg");
    assign(found.aclmdlRICaptureGetInfo, look_up("libascendcl.so", "aclmdlRICaptureGetInfo"));
    return found;
  }();
  return api;
}

void check(int result, const char* call) {
  if (result == 0) return;
  const char* text = ascendcl().aclGetRecentErrMsg();
  throw Error(Error::Kind::State, call, "success",
              "error " + std::to_string(result) + (text ? ": " : "") + (text ? text : ""),
              "Look the number up under aclError, and see the device's log under ~/ascend/log.");
}

}  // namespace npuzero::npu
