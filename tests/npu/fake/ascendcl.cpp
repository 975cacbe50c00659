// libascendcl.so for tests: devices whose memory is host memory, and whose streams are threads.
//
// What it keeps of the real thing, because code can get it wrong:
//   * work on a stream runs later, in order, on a thread of its own: nothing is done when a call returns. Each piece
//     waits FAKE_NPU_DELAY_US (microseconds) first, so that what does not wait for a stream comes too early
//   * fresh memory is not zero; freed memory is overwritten once the work before has run
//   * a copy names its direction, and lies within one allocation on the side of the device
//   * kernels address the memory of the host only where it is registered, and at an address of the device's
//   * an error of work on a stream shows at the next synchronization, and stays
// Compute entry points return errors (refused.cpp): nothing passes by doing nothing.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t total_bytes = size_t{4} << 30;  // of each device
constexpr size_t alignment = 512;
constexpr unsigned char fresh = 0xA5, freed = 0x5A;

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

std::mutex mutex;  // of everything below that is not a stream's own
std::string recent;
std::map<uintptr_t, size_t> allocated;  // device memory: begin, bytes
std::atomic<size_t> used{0};
std::map<int, int64_t> options;
std::atomic<int64_t> async_copies{0};

// What a captured stream was given.
struct Graph {
  std::vector<std::function<void()>> tasks;
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  Graph* capturing = nullptr;
  bool busy = false, ending = false;
  std::string error;
  std::thread worker;

  void push(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (capturing) {
      capturing->tasks.push_back(std::move(task));
      return;
    }
    tasks.push_back(std::move(task));
    if (!worker.joinable()) worker = std::thread([this] { work(); });
    changed.notify_all();
  }

  void work() {
    static const auto delay = std::chrono::microseconds(setting("FAKE_NPU_DELAY_US", 0));
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return ending || !tasks.empty(); });
      if (tasks.empty()) return;
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      if (delay.count()) std::this_thread::sleep_for(delay);
      std::string text;
      try {
        task();
      } catch (const std::exception& problem) {
        text = problem.what();
      }
      lock.lock();
      if (error.empty()) error = text;
      busy = false;
      changed.notify_all();
    }
  }

  bool idle() const { return tasks.empty() && !busy; }

  int synchronize(int timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto done = [this] { return idle(); };
    if (timeout_ms < 0) {
      changed.wait(lock, done);
    } else if (!changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), done)) {
      return fake::fail(fake::task_failed, "a stream did not end within its timeout");
    }
    return error.empty() ? fake::success : fake::fail(fake::task_failed, error);
  }

  ~Stream() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ending = true;
      changed.notify_all();
    }
    if (worker.joinable()) worker.join();
  }
};

// A point in a stream that an event stands for; recording the event again makes a new one.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  Clock::time_point at;

  void reach() {
    const std::lock_guard<std::mutex> lock(mutex);
    at = Clock::now();
    reached = true;
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }

  bool passed() {
    const std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // null: not recorded, which counts as reached

  std::shared_ptr<Mark> now() {
    const std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
  bool passed() {
    const auto mark = now();
    return !mark || mark->passed();
  }
};

// Never destroyed: streams of torch's outlive everything else at a process's end.
auto& streams = *new std::vector<Stream*>;
thread_local int current_device = -1;

Stream& stream_of(void* stream) {
  static Stream& plain = *new Stream;  // the device's default stream
  return stream ? *static_cast<Stream*>(stream) : plain;
}

Event* event_of(void* event) { return static_cast<Event*>(event); }

int synchronize_all(int timeout_ms) {
  std::vector<Stream*> now;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    now = streams;
  }
  now.push_back(&stream_of(nullptr));
  int result = fake::success;
  for (Stream* stream : now) {
    if (const int here = stream->synchronize(timeout_ms)) result = here;
  }
  return result;
}

int allocate(void** out, size_t bytes) {
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  if (!out || !bytes) return fake::fail(fake::invalid_param, "aclrtMalloc: a place for the result and a size");
  if (used + rounded > total_bytes) return fake::fail(fake::out_of_memory, "aclrtMalloc: the device is full");
  void* memory = std::aligned_alloc(alignment, rounded);
  if (!memory) return fake::fail(fake::out_of_memory, "aclrtMalloc: the host is full");
  std::memset(memory, fresh, rounded);
  const std::lock_guard<std::mutex> lock(mutex);
  allocated[reinterpret_cast<uintptr_t>(memory)] = rounded;
  used += rounded;
  *out = memory;
  return fake::success;
}

// kind: 0 host to host, 1 host to device, 2 device to host, 3 device to device.
int check_copy(const void* target, size_t room, const void* source, size_t bytes, int kind) {
  if (kind < 0 || kind > 3 || bytes > room) return fake::fail(fake::invalid_param, "aclrtMemcpy: direction or size");
  if ((kind == 1 || kind == 3) && !fake::on_device(target, bytes)) {
    return fake::fail(fake::invalid_param, "aclrtMemcpy: the target is not in one allocation of the device");
  }
  if ((kind == 2 || kind == 3) && !fake::on_device(source, bytes)) {
    return fake::fail(fake::invalid_param, "aclrtMemcpy: the source is not in one allocation of the device");
  }
  return fake::success;
}

}  // namespace

namespace fake {

void enqueue(void* stream, std::function<void()> task) { stream_of(stream).push(std::move(task)); }

bool on_device(const void* begin, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  auto after = allocated.upper_bound(address);
  if (after == allocated.begin()) return false;
  const auto& [start, size] = *--after;
  return address + bytes <= start + size;
}

std::map<uintptr_t, size_t> allocations() {
  std::map<uintptr_t, size_t> all = registered();
  const std::lock_guard<std::mutex> lock(mutex);
  all.insert(allocated.begin(), allocated.end());
  return all;
}

int fail(int result, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex);
  recent = "fake npu: " + text;
  return result;
}

}  // namespace fake

using fake::success;

// --- the process and its device ------------------------------------------------------------------------------------

FAKE_API int aclInit(const char*) { return success; }
FAKE_API int aclFinalize() { return success; }
FAKE_API const char* aclGetRecentErrMsg() {
  thread_local std::string text;
  const std::lock_guard<std::mutex> lock(mutex);
  text = recent;
  return text.c_str();
}
FAKE_API void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
FAKE_API const char* aclrtGetSocName() {
  const char* name = std::getenv("FAKE_NPU_SOC");
  return name ? name : "Ascend910B1";
}
FAKE_API int aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(setting("FAKE_NPU_DEVICES", 8));
  return success;
}
FAKE_API int aclrtSetDevice(int32_t device) {
  uint32_t count;
  aclrtGetDeviceCount(&count);
  if (device < 0 || device >= static_cast<int32_t>(count)) return fake::fail(fake::invalid_param, "no such device");
  current_device = device;
  return success;
}
FAKE_API int aclrtResetDevice(int32_t) {
  current_device = -1;
  return success;
}
FAKE_API int aclrtGetDevice(int32_t* device) {
  if (current_device < 0) return fake::fail(fake::invalid_param, "no device is set");
  *device = current_device;
  return success;
}
FAKE_API int aclrtGetCurrentContext(void** context) {
  if (current_device < 0) return fake::fail(fake::invalid_param, "no device is set");
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(current_device) + 1);
  return success;
}
FAKE_API int aclrtSetCurrentContext(void* context) {
  current_device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return success;
}
// info: 0 cube cores, 1 vector cores, 2 bytes of the second-level cache.
FAKE_API int aclGetDeviceCapability(uint32_t, int info, int64_t* value) {
  constexpr int64_t values[] = {24, 48, int64_t{192} << 20};
  if (info < 0 || info > 2) return fake::fail(fake::unsupported, "aclGetDeviceCapability: unknown fact");
  *value = values[info];
  return success;
}
FAKE_API int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return success;
}
FAKE_API int aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return success; }
// Options such as determinism: kept, and without effect.
FAKE_API int aclrtSetSysParamOpt(int option, int64_t value) {
  const std::lock_guard<std::mutex> lock(mutex);
  options[option] = value;
  return success;
}
FAKE_API int aclrtGetSysParamOpt(int option, int64_t* value) {
  const std::lock_guard<std::mutex> lock(mutex);
  *value = options[option];
  return success;
}
FAKE_API int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
FAKE_API int aclrtCtxGetSysParamOpt(int option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }
FAKE_API int aclrtSetOpExecuteTimeOut(uint32_t) { return success; }
FAKE_API int aclrtSetOpWaitTimeout(uint32_t) { return success; }
FAKE_API int aclrtSetDeviceSatMode(int) { return success; }
FAKE_API int aclrtSetStreamFailureMode(void*, uint64_t) { return success; }
FAKE_API int aclrtSetStreamOverflowSwitch(void*, uint32_t) { return success; }
FAKE_API int aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return success;
}

// --- memory --------------------------------------------------------------------------------------------------------

FAKE_API int aclrtMalloc(void** out, size_t bytes, int) { return allocate(out, bytes); }
FAKE_API int aclrtMallocAlign32(void** out, size_t bytes, int) { return allocate(out, bytes); }
FAKE_API int aclrtFree(void* memory) {
  synchronize_all(-1);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocated.find(reinterpret_cast<uintptr_t>(memory));
  if (found == allocated.end()) return fake::invalid_param;
  std::memset(memory, freed, found->second);
  used -= found->second;
  allocated.erase(found);
  std::free(memory);
  return success;
}
FAKE_API int aclrtGetMemInfo(int, size_t* free, size_t* total) {
  *total = total_bytes;
  *free = total_bytes - used;
  return success;
}
FAKE_API int aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, int kind) {
  if (const int wrong = check_copy(target, room, source, bytes, kind)) return wrong;
  std::memmove(target, source, bytes);
  return success;
}
FAKE_API int aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, int kind, void* stream) {
  if (const int wrong = check_copy(target, room, source, bytes, kind)) return wrong;
  async_copies += 1;
  fake::enqueue(stream, [=] { std::memmove(target, source, bytes); });
  return success;
}
// Not CANN's: how many of these there were, for tests.
FAKE_API int64_t fakeAsyncCopies() { return async_copies; }
FAKE_API int aclrtMemset(void* memory, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return fake::fail(fake::invalid_param, "aclrtMemset: size");
  std::memset(memory, value, bytes);
  return success;
}
FAKE_API int aclrtMemsetAsync(void* memory, size_t room, int32_t value, size_t bytes, void* stream) {
  if (bytes > room || !fake::on_device(memory, bytes)) return fake::fail(fake::invalid_param, "aclrtMemsetAsync");
  fake::enqueue(stream, [=] { std::memset(memory, value, bytes); });
  return success;
}

// --- streams and events --------------------------------------------------------------------------------------------

FAKE_API int aclrtCreateStream(void** out) {
  auto* stream = new Stream;
  const std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(stream);
  *out = stream;
  return success;
}
FAKE_API int aclrtCreateStreamWithConfig(void** out, uint32_t, uint32_t) { return aclrtCreateStream(out); }
FAKE_API int aclrtDestroyStream(void* stream) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto at = streams.begin(); at != streams.end(); ++at) {
      if (*at == stream) {
        streams.erase(at);
        break;
      }
    }
  }
  delete static_cast<Stream*>(stream);
  return success;
}
FAKE_API int aclrtDestroyStreamForce(void* stream) { return aclrtDestroyStream(stream); }
FAKE_API int aclrtSynchronizeStream(void* stream) { return stream_of(stream).synchronize(-1); }
FAKE_API int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t ms) { return stream_of(stream).synchronize(ms); }
FAKE_API int aclrtSynchronizeDevice() { return synchronize_all(-1); }
FAKE_API int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { return synchronize_all(ms); }
FAKE_API int aclrtStreamQuery(void* stream, int* status) {
  Stream& queue = stream_of(stream);
  const std::lock_guard<std::mutex> lock(queue.mutex);
  *status = queue.idle() ? 0 : 1;
  return success;
}

FAKE_API int aclrtCreateEvent(void** out) {
  *out = new Event;
  return success;
}
FAKE_API int aclrtCreateEventWithFlag(void** out, uint32_t) { return aclrtCreateEvent(out); }
FAKE_API int aclrtCreateEventExWithFlag(void** out, uint32_t) { return aclrtCreateEvent(out); }
FAKE_API int aclrtDestroyEvent(void* event) {
  delete event_of(event);
  return success;
}
FAKE_API int aclrtRecordEvent(void* event, void* stream) {
  auto mark = std::make_shared<Mark>();
  {
    const std::lock_guard<std::mutex> lock(event_of(event)->mutex);
    event_of(event)->mark = mark;
  }
  fake::enqueue(stream, [mark] { mark->reach(); });
  return success;
}
FAKE_API int aclrtStreamWaitEvent(void* stream, void* event) {
  if (const auto mark = event_of(event)->now()) fake::enqueue(stream, [mark] { mark->wait(); });
  return success;
}
FAKE_API int aclrtResetEvent(void*, void*) { return success; }
FAKE_API int aclrtSynchronizeEvent(void* event) {
  if (const auto mark = event_of(event)->now()) mark->wait();
  return success;
}
FAKE_API int aclrtQueryEvent(void* event, int* status) {
  *status = event_of(event)->passed() ? 0 : 1;
  return success;
}
FAKE_API int aclrtQueryEventStatus(void* event, int* status) {
  *status = event_of(event)->passed() ? 1 : 0;
  return success;
}
FAKE_API int aclrtQueryEventWaitStatus(void* event, int* status) {
  *status = event_of(event)->passed() ? 0 : 1;
  return success;
}
FAKE_API int aclrtEventElapsedTime(float* ms, void* start, void* end) {
  const auto first = event_of(start)->now(), last = event_of(end)->now();
  if (!first || !last) return fake::fail(fake::invalid_param, "aclrtEventElapsedTime: an event that was not recorded");
  first->wait();
  last->wait();
  *ms = std::chrono::duration<float, std::milli>(last->at - first->at).count();
  return success;
}

// --- graphs ----------------------------------------------------------------------------------------------------------

FAKE_API int aclmdlRICaptureBegin(void* stream, int) {
  Stream& queue = stream_of(stream);
  const std::lock_guard<std::mutex> lock(queue.mutex);
  queue.capturing = new Graph;
  return success;
}
FAKE_API int aclmdlRICaptureGetInfo(void* stream, int* status, void** graph) {
  Stream& queue = stream_of(stream);
  const std::lock_guard<std::mutex> lock(queue.mutex);
  *status = queue.capturing ? 1 : 0;
  *graph = queue.capturing;
  return success;
}
FAKE_API int aclmdlRICaptureEnd(void* stream, void** graph) {
  Stream& queue = stream_of(stream);
  const std::lock_guard<std::mutex> lock(queue.mutex);
  *graph = std::exchange(queue.capturing, nullptr);
  return success;
}
FAKE_API int aclmdlRICaptureThreadExchangeMode(int*) { return success; }
FAKE_API int aclmdlRIExecuteAsync(void* graph, void* stream) {
  for (const auto& task : static_cast<Graph*>(graph)->tasks) fake::enqueue(stream, task);
  return success;
}
FAKE_API int aclmdlRIDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return success;
}
