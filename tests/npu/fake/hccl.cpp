// libhccl.so for tests: collectives of a few processes of one host, over POSIX shared memory.
//
// Operations run on the given stream, in rounds: every rank lays what it brings into its slot, all meet, every rank
// takes what it needs, all meet again. What real ones refuse is refused: sums of float64 and of uint8, memory that is
// not the device's. Ranks that call different things are an error on all of them, and one that stays away for
// FAKE_HCCL_TIMEOUT_MS is one too. Sums are made in the order of the ranks, in float32, rounded once: real ones promise
// neither. FAKE_HCCL_LOG names a file that gets a line for each communicator and operation.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/numeric.h"
#include "device.h"

namespace {

enum Hccl : int { ok = 0, bad_parameter = 1, not_supported = 5, timed_out = 9 };
enum Type : int { i8, i16, i32, f16, f32, i64, u64, u8, u16, u32, f64, bf16, types };
enum Reduction : int { sum, product, maximum, minimum };

constexpr size_t type_bytes[types] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
constexpr size_t slot_bytes = 1 << 18;  // small, so that tests of moderate size go through several rounds
constexpr uint32_t most_ranks = 16;
constexpr size_t root_info_bytes = 4108;
constexpr size_t config_buffer_at = 24;  // of the communicator's configuration: buffer size in MB, 32 bits

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

void log(const std::string& line) {
  if (const char* path = std::getenv("FAKE_HCCL_LOG")) {
    const std::string text = std::to_string(getpid()) + " " + line + "\n";
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file < 0 || write(file, text.data(), text.size()) < 0) std::perror("FAKE_HCCL_LOG");
    close(file);
  }
}

// What a rank is about to do; all ranks of a communicator must be about to do the same.
struct Call {
  char verb[16];
  uint64_t count, type, detail;  // detail: kind of reduction, or the root
};

struct Shared {
  std::atomic<uint32_t> arrived, round, attached;
  Call calls[most_ranks];
  uint64_t longest[most_ranks];
  unsigned char slots[];
};

class Comm {
 public:
  Comm(const std::string& name, uint32_t ranks, uint32_t rank) : ranks(ranks), rank(rank), name_(name) {
    bytes_ = sizeof(Shared) + ranks * slot_bytes;
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes_))) throw std::runtime_error("shm_open: " + name);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    shared_ = static_cast<Shared*>(memory);  // fresh shared memory is zero, which is where the counters begin
    ++shared_->attached;
    wait([&] { return shared_->attached.load() >= ranks; }, "to be made", setting("HCCL_CONNECT_TIMEOUT", 120) * 1000);
    meet();
    if (rank == 0) shm_unlink(name.c_str());  // all have it open: nothing can stay behind
  }

  ~Comm() { munmap(shared_, bytes_); }

  unsigned char* slot(uint32_t of) { return shared_->slots + of * slot_bytes; }
  uint64_t& longest(uint32_t of) { return shared_->longest[of]; }

  void begin(const Call& call) {
    shared_->calls[rank] = call;
    meet();
    for (uint32_t other = 0; other < ranks; ++other) {
      if (std::memcmp(&shared_->calls[other], &call, sizeof call) != 0) {
        throw std::runtime_error("hccl: rank " + std::to_string(rank) + " called " + text(call) + ", rank " +
                                 std::to_string(other) + " called " + text(shared_->calls[other]));
      }
    }
    meet();
  }

  void meet() {
    const uint32_t round = shared_->round.load();
    if (++shared_->arrived == ranks) {
      shared_->arrived = 0;
      ++shared_->round;
    } else {
      static const int timeout_ms = setting("FAKE_HCCL_TIMEOUT_MS", 60000);
      wait([&] { return shared_->round.load() != round; }, "in a collective", timeout_ms);
    }
  }

  static std::string text(const Call& call) {
    return std::string(call.verb) + " count=" + std::to_string(call.count) + " type=" + std::to_string(call.type) +
           " detail=" + std::to_string(call.detail);
  }

  const uint32_t ranks, rank;

 private:
  void wait(const std::function<bool()>& there, const char* where, int timeout_ms) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (int spins = 0; !there(); ++spins) {
      if (std::chrono::steady_clock::now() > end) {
        throw std::runtime_error("EI0006: hccl: a rank did not come " + std::string(where) + " within " +
                                 std::to_string(timeout_ms) + " ms");
      }
      if (spins > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  std::string name_;
  size_t bytes_;
  Shared* shared_;
};

Comm& comm_of(void* comm) { return *static_cast<Comm*>(comm); }

template <class T>
T reduced(T a, T b, int kind) {
  switch (kind) {
    case product: return static_cast<T>(a * b);
    case maximum: return a > b ? a : b;
    case minimum: return a < b ? a : b;
    default: return static_cast<T>(a + b);
  }
}

// out[i] = the reduction over the ranks of what lies at `at` of their slots.
template <class Bits, class Wide, class Widen, class Round>
void reduce(Comm& comm, void* out, size_t at, size_t count, int kind, Widen widen, Round round) {
  for (size_t i = 0; i < count; ++i) {
    Wide total{};
    for (uint32_t rank = 0; rank < comm.ranks; ++rank) {
      Bits bits;
      std::memcpy(&bits, comm.slot(rank) + at + i * sizeof bits, sizeof bits);
      total = rank ? reduced<Wide>(total, widen(bits), kind) : widen(bits);
    }
    const Bits result = round(total);
    std::memcpy(static_cast<unsigned char*>(out) + i * sizeof result, &result, sizeof result);
  }
}

template <class T>
void reduce_plain(Comm& comm, void* out, size_t at, size_t count, int kind) {
  const auto same = [](T value) { return value; };
  reduce<T, T>(comm, out, at, count, kind, same, same);
}

void reduce_as(int type, Comm& comm, void* out, size_t at, size_t count, int kind) {
  using namespace npuzero;
  switch (type) {
    case i8: return reduce_plain<int8_t>(comm, out, at, count, kind);
    case i16: return reduce_plain<int16_t>(comm, out, at, count, kind);
    case i32: return reduce_plain<int32_t>(comm, out, at, count, kind);
    case i64: return reduce_plain<int64_t>(comm, out, at, count, kind);
    case f32: return reduce_plain<float>(comm, out, at, count, kind);
    case bf16: return reduce<uint16_t, float>(comm, out, at, count, kind, BF16::widen, BF16::round);
    case f16: return reduce<uint16_t, float>(comm, out, at, count, kind, F16::widen, F16::round);
    default: throw std::runtime_error("a reduction of this type was let through");
  }
}

bool reducible(int type) {
  return type == i8 || type == i16 || type == i32 || type == i64 || (type >= f16 && type <= f32) || type == bf16;
}

// Checks what can be checked now, and puts `step(comm)` on the stream behind a check that all ranks do the same.
template <class Step>
int run(const char* verb, void* comm, void* stream, int type, uint64_t count, uint64_t detail,
        std::vector<std::pair<const void*, size_t>> memory, bool reduces, Step step) {
  if (type < 0 || type >= types || (reduces && !reducible(type))) {
    return fake::fail(not_supported, std::string(verb) + ": hccl does not reduce or carry this type");
  }
  for (const auto& [begin, bytes] : memory) {
    if (bytes && !fake::on_device(begin, bytes)) {
      return fake::fail(bad_parameter, std::string(verb) + ": a buffer is not in one allocation of the device");
    }
  }
  Call call{{}, count, static_cast<uint64_t>(type), detail};
  std::strncpy(call.verb, verb, sizeof call.verb - 1);
  log("call " + Comm::text(call) + " ranks=" + std::to_string(comm_of(comm).ranks));
  fake::enqueue(stream, [comm, call, step] {
    comm_of(comm).begin(call);
    step(comm_of(comm));
  });
  return ok;
}

// Calls step(first, n) for rounds of elements that fit `parts` to a slot.
template <class Step>
void rounds(uint64_t count, size_t item, size_t parts, Step step) {
  const uint64_t most = slot_bytes / parts / item;
  for (uint64_t first = 0; first < count; first += most) step(first, std::min(most, count - first));
}

const unsigned char* at(const void* base, uint64_t bytes) { return static_cast<const unsigned char*>(base) + bytes; }
unsigned char* at(void* base, uint64_t bytes) { return static_cast<unsigned char*>(base) + bytes; }

int make(uint32_t ranks, const void* info, uint32_t rank, uint32_t buffer_mb, void** out) {
  if (ranks > most_ranks || rank >= ranks) return fake::fail(bad_parameter, "a communicator of too many ranks");
  try {
    *out = new Comm(static_cast<const char*>(info), ranks, rank);
  } catch (const std::exception& problem) {
    return fake::fail(timed_out, problem.what());
  }
  log("comm ranks=" + std::to_string(ranks) + " rank=" + std::to_string(rank) +
      " buffer_mb=" + std::to_string(buffer_mb));
  return ok;
}

}  // namespace

FAKE_API const char* HcclGetErrorString(int result) {
  return result == not_supported ? "not supported" : result == timed_out ? "timeout" : result ? "error" : "no error";
}

FAKE_API int HcclGetRootInfo(void* info) {
  static std::atomic<int> made{0};
  std::memset(info, 0, root_info_bytes);
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::snprintf(static_cast<char*>(info), 64, "/fake-hccl-%d-%d-%lld", getpid(), made++, static_cast<long long>(now));
  return ok;
}

FAKE_API int HcclCommInitRootInfo(uint32_t ranks, const void* info, uint32_t rank, void** comm) {
  return make(ranks, info, rank, 0, comm);
}

FAKE_API int HcclCommInitRootInfoConfig(uint32_t ranks, const void* info, uint32_t rank, const void* config,
                                        void** comm) {
  uint32_t buffer_mb;
  std::memcpy(&buffer_mb, at(config, config_buffer_at), sizeof buffer_mb);
  return make(ranks, info, rank, buffer_mb, comm);
}

// Buffer size, determinism and name can be configured.
FAKE_API uint32_t HcclGetCommConfigCapability() { return 3; }

FAKE_API int HcclCommDestroy(void* comm) {
  delete static_cast<Comm*>(comm);
  return ok;
}

FAKE_API int HcclGetCommAsyncError(void*, int* error) {
  *error = ok;
  return ok;
}

FAKE_API int HcclSetConfig(int, uint64_t) { return ok; }

FAKE_API int HcclAllGather(void* send, void* receive, uint64_t count, int type, void* comm, void* stream) {
  const size_t item = type_bytes[type], whole = count * item * comm_of(comm).ranks;
  return run("AllGather", comm, stream, type, count, 0, {{send, count * item}, {receive, whole}}, false, [=](Comm& my) {
    rounds(count, item, 1, [&](uint64_t first, uint64_t n) {
      std::memcpy(my.slot(my.rank), at(send, first * item), n * item);
      my.meet();
      for (uint32_t r = 0; r < my.ranks; ++r)
        std::memcpy(at(receive, (r * count + first) * item), my.slot(r), n * item);
      my.meet();
    });
  });
}

FAKE_API int HcclAllReduce(void* send, void* receive, uint64_t count, int type, int kind, void* comm, void* stream) {
  const size_t item = type_bytes[type];
  return run("AllReduce", comm, stream, type, count, static_cast<uint64_t>(kind),
             {{send, count * item}, {receive, count * item}}, true, [=](Comm& my) {
               rounds(count, item, 1, [&](uint64_t first, uint64_t n) {
                 std::memcpy(my.slot(my.rank), at(send, first * item), n * item);
                 my.meet();
                 reduce_as(type, my, at(receive, first * item), 0, n, kind);
                 my.meet();
               });
             });
}

FAKE_API int HcclReduceScatter(void* send, void* receive, uint64_t count, int type, int kind, void* comm,
                               void* stream) {
  const size_t item = type_bytes[type], whole = count * item * comm_of(comm).ranks;
  return run("ReduceScatter", comm, stream, type, count, static_cast<uint64_t>(kind),
             {{send, whole}, {receive, count * item}}, true, [=](Comm& my) {
               rounds(count, item, my.ranks, [&](uint64_t first, uint64_t n) {
                 for (uint32_t r = 0; r < my.ranks; ++r) {
                   std::memcpy(my.slot(my.rank) + r * n * item, at(send, (r * count + first) * item), n * item);
                 }
                 my.meet();
                 reduce_as(type, my, at(receive, first * item), my.rank * n * item, n, kind);
                 my.meet();
               });
             });
}

FAKE_API int HcclBroadcast(void* buffer, uint64_t count, int type, uint32_t root, void* comm, void* stream) {
  const size_t item = type_bytes[type];
  return run("Broadcast", comm, stream, type, count, root, {{buffer, count * item}}, false, [=](Comm& my) {
    rounds(count, item, 1, [&](uint64_t first, uint64_t n) {
      if (my.rank == root) std::memcpy(my.slot(root), at(buffer, first * item), n * item);
      my.meet();
      if (my.rank != root) std::memcpy(at(buffer, first * item), my.slot(root), n * item);
      my.meet();
    });
  });
}

// Counts and displacements are in elements, one for each rank.
FAKE_API int HcclAlltoAllV(const void* send, const void* send_counts, const void* send_at, int type,
                           const void* receive, const void* receive_counts, const void* receive_at, int, void* comm,
                           void* stream) {
  const size_t item = type_bytes[type];
  const uint32_t ranks = comm_of(comm).ranks;
  const auto list = [ranks](const void* from) {
    const auto* numbers = static_cast<const uint64_t*>(from);
    return std::vector<uint64_t>(numbers, numbers + ranks);
  };
  const auto out_counts = list(send_counts), out_at = list(send_at), in_counts = list(receive_counts),
             in_at = list(receive_at);
  return run("AlltoAll", comm, stream, type, 0, 0, {}, false, [=](Comm& my) {
    my.longest(my.rank) = *std::max_element(out_counts.begin(), out_counts.end());
    my.meet();
    uint64_t longest = 0;
    for (uint32_t r = 0; r < ranks; ++r) longest = std::max(longest, my.longest(r));
    rounds(longest, item, ranks, [&](uint64_t first, uint64_t n) {
      for (uint32_t r = 0; r < ranks; ++r) {
        const uint64_t here = out_counts[r] > first ? std::min(n, out_counts[r] - first) : 0;
        std::memcpy(my.slot(my.rank) + r * n * item, at(send, (out_at[r] + first) * item), here * item);
      }
      my.meet();
      for (uint32_t r = 0; r < ranks; ++r) {
        const uint64_t here = in_counts[r] > first ? std::min(n, in_counts[r] - first) : 0;
        std::memcpy(const_cast<unsigned char*>(at(receive, (in_at[r] + first) * item)), my.slot(r) + my.rank * n * item,
                    here * item);
      }
      my.meet();
    });
    my.meet();
  });
}

FAKE_API int HcclAlltoAll(const void* send, uint64_t send_count, int type, const void* receive, uint64_t receive_count,
                          int receive_type, void* comm, void* stream) {
  const uint32_t ranks = comm_of(comm).ranks;
  std::vector<uint64_t> send_counts(ranks, send_count), receive_counts(ranks, receive_count), send_at, receive_at;
  for (uint32_t r = 0; r < ranks; ++r) {
    send_at.push_back(r * send_count);
    receive_at.push_back(r * receive_count);
  }
  return HcclAlltoAllV(send, send_counts.data(), send_at.data(), type, receive, receive_counts.data(),
                       receive_at.data(), receive_type, comm, stream);
}
