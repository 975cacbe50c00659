// The Launcher over libascendcl, and the slots that use it.
#include "npu/host/kernels.h"

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/check.h"
#include "core/kernel_table.h"
#include "npu/host/ascendcl.h"
#include "npu/launch.h"

namespace npuzero::npu {
namespace {

// Numbers of the documented C API.
constexpr int vector_cores = 1;                       // aclDeviceInfo
constexpr int huge_pages_first = 0;                   // aclrtMemMallocPolicy
constexpr int host_to_device = 1;                     // aclrtMemcpyKind
constexpr uint32_t tracks_progress = 2;               // event flag: it is asked for, and no stream waits for it
constexpr int complete = 1;                           // aclrtEventRecordedStatus
constexpr size_t least_slot_bytes = size_t{1} << 13;  // 48 shares and some parts

using Entry = uint32_t (*)(uint32_t cores, void* stream, void* table);

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// A table's place on the device, and the pinned copy that it is filled from. Neither is touched until the launches that
// read it are done: nobody waits for that, the next one free is taken.
struct Slot {
  void *host = nullptr, *device = nullptr, *event = nullptr;
  size_t bytes = 0;
  bool launched = false;

  bool free() const {
    if (!launched) return true;
    int status = 0;
    check(ascendcl().aclrtQueryEventStatus(event, &status), "aclrtQueryEventStatus");
    return status == complete;
  }
};

class AscendLauncher final : public Launcher {
 public:
  explicit AscendLauncher(std::string library) : library(std::move(library)) {}

  uint64_t table(const void* content, int64_t bytes, Stream stream) override {
    slot_ = &take(static_cast<size_t>(bytes));
    std::memcpy(slot_->host, content, static_cast<size_t>(bytes));
    check(ascendcl().aclrtMemcpyAsync(slot_->device, slot_->bytes, slot_->host, static_cast<size_t>(bytes),
                                      host_to_device, pointer(stream)),
          "aclrtMemcpyAsync");
    return reinterpret_cast<uint64_t>(slot_->device);
  }

  void launch(const char* kernel, int cores, uint64_t table, Stream stream) override {
    const auto result = entry(kernel)(static_cast<uint32_t>(cores), pointer(stream), pointer(table));
    check(static_cast<int>(result), kernel);
    check(ascendcl().aclrtRecordEvent(slot_->event, pointer(stream)), "aclrtRecordEvent");
    slot_->launched = true;
  }

  // Vector cores of the thread's device.
  int cores() {
    const int32_t device = current_device();
    int& found = cores_[device];
    if (found == 0) {
      int64_t value = 0;
      check(ascendcl().aclGetDeviceCapability(static_cast<uint32_t>(device), vector_cores, &value),
            "aclGetDeviceCapability");
      found = static_cast<int>(value);
    }
    return found;
  }

  const std::string library;
  std::mutex mutex;  // held over an op: its table and its launches belong together

 private:
  static int32_t current_device() {
    int32_t device = 0;
    check(ascendcl().aclrtGetDevice(&device), "aclrtGetDevice");
    return device;
  }

  Slot& take(size_t bytes) {
    std::vector<Slot>& slots = slots_[current_device()];
    for (Slot& slot : slots) {
      if (slot.bytes >= bytes && slot.free()) return slot;
    }
    Slot slot;
    for (slot.bytes = least_slot_bytes; slot.bytes < bytes;) slot.bytes *= 2;
    check(ascendcl().aclrtMallocHost(&slot.host, slot.bytes), "aclrtMallocHost");
    check(ascendcl().aclrtMalloc(&slot.device, slot.bytes, huge_pages_first), "aclrtMalloc");
    check(ascendcl().aclrtCreateEventExWithFlag(&slot.event, tracks_progress), "aclrtCreateEventExWithFlag");
    slots.push_back(slot);
    return slots.back();
  }

  Entry entry(const char* kernel) {
    Entry& found = entries_[kernel];
    if (!found) {
      found =
          reinterpret_cast<Entry>(find(library.c_str(), (std::string("aclrtlaunch_") + kernel).c_str(), kernel,
                                       "Build the kernels anew, `npuzero build-npu`, with the CANN that runs them."));
    }
    return found;
  }

  std::map<std::string, Entry> entries_;
  std::map<int32_t, int> cores_;
  std::map<int32_t, std::vector<Slot>> slots_;  // never given back: as many as launches were ever under way at once
  Slot* slot_ = nullptr;                        // of the op under way
};

// Never destroyed: the device may be gone before this process's statics are.
AscendLauncher* launcher = nullptr;

template <class Args, void (*launch_op)(const Args&, Stream, int, Launcher&)>
void run(const Args& args, Stream stream) {
  AscendLauncher& mine = *launcher;
  const std::lock_guard<std::mutex> lock(mine.mutex);
  launch_op(args, stream, mine.cores(), mine);
}

}  // namespace

void use_kernels(const std::string& library) {
  const bool any = !library.empty();
  launcher = any ? new AscendLauncher(library) : nullptr;
  set_kernel<CastArgs>(Device::npu, any ? &run<CastArgs, &launch_cast> : nullptr);
  set_kernel<FlatAdamArgs>(Device::npu, any ? &run<FlatAdamArgs, &launch_flat_adam> : nullptr);
  set_kernel<NormArgs>(Device::npu, any ? &run<NormArgs, &launch_norm> : nullptr);
  set_kernel<PackArgs>(Device::npu, any ? &run<PackArgs, &launch_pack> : nullptr);
}

std::string kernels_in_use() { return launcher ? launcher->library : ""; }

}  // namespace npuzero::npu
