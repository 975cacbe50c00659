// The Launcher over libascendcl, and the slots that use it.
#include "npu/host/kernels.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/kernel_table.h"
#include "npu/host/ascendcl.h"
#include "npu/host/first_use.h"
#include "npu/launch.h"

namespace npuzero::npu {
namespace {

// Numbers of the documented C API.
constexpr int vector_cores = 1;                       // aclDeviceInfo
constexpr uint32_t tracks_progress = 2;               // event flag: it is asked for, and no stream waits for it
constexpr int not_supported = 207000;                 // aclError, by a device that captures no streams
constexpr int not_capturing = 0;                      // aclmdlRICaptureStatus
constexpr int complete = 1;                           // aclrtEventRecordedStatus
constexpr size_t least_slot_bytes = size_t{1} << 13;  // 48 shares and some parts
constexpr size_t kept_slots = 256;                    // of a device, before one is filled anew

using Entry = uint32_t (*)(uint32_t cores, void* stream, void* table);

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// A table's place on the device, and the pinned copy that it is filled from. Neither is touched until the launches that
// read it are done: nobody waits for that. Buffers of training stay where they are, so most tables come again: what is
// there already is not sent anew.
struct Slot {
  void *host = nullptr, *device = nullptr, *event = nullptr;
  size_t bytes = 0, content_bytes = 0, hash = 0;
  Stream stream = 0;        // of the last copy or launch, which `event` comes after
  uint64_t last_taken = 0;  // by the count of tables

  // Whether everything that was enqueued with it is over.
  bool free() const {
    int status = 0;
    check(ascendcl().aclrtQueryEventStatus(event, &status), "aclrtQueryEventStatus");
    return status == complete;
  }

  // Whether a launch on `to` finds this content: it comes after the copy on the same stream, or the copy is over.
  bool serves(const void* content, size_t count, size_t its_hash, Stream to) const {
    return content_bytes == count && hash == its_hash && std::memcmp(host, content, count) == 0 &&
           (stream == to || free());
  }
};

class AscendLauncher final : public Launcher {
 public:
  explicit AscendLauncher(std::string library) : library(std::move(library)) {}

  uint64_t table(const void* content, int64_t bytes, Stream stream) override {
    const auto count = static_cast<size_t>(bytes);
    const size_t hash = std::hash<std::string_view>{}({static_cast<const char*>(content), count});
    std::vector<Slot>& slots = slots_[current_device()];
    slot_ = find_filled(slots, content, count, hash, stream);
    if (!slot_) {
      slot_ = &take(slots, count);
      slot_->content_bytes = 0;  // until the copy is under way
      std::memcpy(slot_->host, content, count);
      check(
          ascendcl().aclrtMemcpyAsync(slot_->device, slot_->bytes, slot_->host, count, host_to_device, pointer(stream)),
          "aclrtMemcpyAsync");
      record(stream);
      slot_->content_bytes = count;
      slot_->hash = hash;
    }
    slot_->last_taken = ++tables_;
    return reinterpret_cast<uint64_t>(slot_->device);
  }

  void launch(const char* kernel, int cores, uint64_t table, Stream stream) override {
    const auto result = entry(kernel)(static_cast<uint32_t>(cores), pointer(stream), pointer(table));
    check(static_cast<int>(result), kernel);
    record(stream);
    int& largest = largest_[kernel];
    largest = std::max(largest, cores);
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

  // Once for each device, and again where it failed: an update that nobody made must not pass for one.
  void rely_on_kernels(Stream stream) {
    if (relied_on_.count(current_device())) return;
    check_first_use(library, stream, cores(), *this);
    relied_on_.insert(current_device());
  }

  const std::map<std::string, int>& largest_launches() const { return largest_; }

  const std::string library;
  std::mutex mutex;  // held over an op: its table and its launches belong together

 private:
  static int32_t current_device() {
    int32_t device = 0;
    check(ascendcl().aclrtGetDevice(&device), "aclrtGetDevice");
    return device;
  }

  void record(Stream stream) {
    check(ascendcl().aclrtRecordEvent(slot_->event, pointer(stream)), "aclrtRecordEvent");
    slot_->stream = stream;
  }

  static Slot* find_filled(std::vector<Slot>& slots, const void* content, size_t bytes, size_t hash, Stream stream) {
    for (Slot& slot : slots) {
      if (slot.serves(content, bytes, hash, stream)) return &slot;
    }
    return nullptr;
  }

  // A place that nobody reads: a new one, or once there are many the one that was not asked for the longest.
  static Slot& take(std::vector<Slot>& slots, size_t bytes) {
    Slot* oldest = nullptr;
    for (Slot& slot : slots) {
      const bool older = slot.bytes >= bytes && (!oldest || slot.last_taken < oldest->last_taken);
      if (slots.size() >= kept_slots && older && slot.free()) oldest = &slot;
    }
    if (oldest) return *oldest;
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
  std::map<std::string, int> largest_;
  std::map<int32_t, int> cores_;
  std::set<int32_t> relied_on_;
  std::map<int32_t, std::vector<Slot>> slots_;  // never given back: kept_slots, or more that are under way at once
  Slot* slot_ = nullptr;                        // of the op under way
  uint64_t tables_ = 0;
};

// Never destroyed: the device may be gone before this process's statics are.
AscendLauncher* launcher = nullptr;

// A graph keeps the address of a launch's table, and a slot is filled anew for other launches.
void refuse_capture(const char* op, Stream stream) {
  const auto ask = ascendcl().aclmdlRICaptureGetInfo;
  if (!ask) return;
  int status = not_capturing;
  void* graph = nullptr;
  const int result = ask(pointer(stream), &status, &graph);
  if (result == not_supported) return;
  check(result, "aclmdlRICaptureGetInfo");
  if (status == not_capturing) return;
  throw Error(Error::Kind::State, std::string(op) + " on npu", "a stream that runs what it is given",
              "one that is captured: the graph would replay the kernel with what later launches leave in its table",
              "Leave npuzero's calls (and so the forward, backward and step of a model under zero()) out of graphs.");
}

template <class Args, void (*launch_op)(const Args&, Stream, int, Launcher&)>
void run(const Args& args, Stream stream) {
  AscendLauncher& mine = *launcher;
  const std::lock_guard<std::mutex> lock(mine.mutex);
  refuse_capture(Args::op, stream);
  mine.rely_on_kernels(stream);
  launch_op(args, stream, mine.cores(), mine);
}

}  // namespace

void use_kernels(const std::string& library) {
  const bool any = !library.empty();
  launcher = any ? new AscendLauncher(library) : nullptr;
  set_kernel<CastArgs>(Device::npu, any ? &run<CastArgs, &launch_cast> : nullptr);
  set_kernel<DequantizeSumArgs>(Device::npu, any ? &run<DequantizeSumArgs, &launch_dequantize_sum> : nullptr);
  set_kernel<FlatAdamArgs>(Device::npu, any ? &run<FlatAdamArgs, &launch_flat_adam> : nullptr);
  set_kernel<FlatLionArgs>(Device::npu, any ? &run<FlatLionArgs, &launch_flat_lion> : nullptr);
  set_kernel<NormArgs>(Device::npu, any ? &run<NormArgs, &launch_norm> : nullptr);
  set_kernel<PackArgs>(Device::npu, any ? &run<PackArgs, &launch_pack> : nullptr);
  set_kernel<QuantizeArgs>(Device::npu, any ? &run<QuantizeArgs, &launch_quantize> : nullptr);
}

std::map<std::string, int> largest_launches() {
  if (!launcher) return {};
  const std::lock_guard<std::mutex> lock(launcher->mutex);
  return launcher->largest_launches();
}

std::string kernels_in_use() { return launcher ? launcher->library : ""; }

}  // namespace npuzero::npu
