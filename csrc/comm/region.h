// Region: the memory the ranks of one communicator share.
//
//   Header | Post of rank 0 | Post of rank 1 | ... | slots of rank 0 | slots of rank 1 | ...
//
// A rank writes its own Post and slots and reads those of the others; only Header::failed, Header::failure and the
// bells are written by several. Between processes the memory is an anonymous file (memfd) which the others open through
// /proc/<pid>/fd/<n>: no name exists, so nothing can stay behind, whatever kills whom. Where that path cannot be
// opened, a named object is used, whose name the last rank to arrive removes. Between threads it is plain memory.
// A forked child is none of the ranks: what it does to its parent's region, the other ranks never see.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "comm/arena.h"
#include "comm/futex.h"

namespace npuzero::comm {

constexpr int slots_per_rank = 2;  // one is filled while the other is read

// What a rank says it is about to do. All ranks of a communicator must say the same at the same sequence number.
struct Signature {
  uint64_t sequence;
  uint64_t numel;
  int32_t verb;
  int32_t root;
  char dtype[16];
  char tag[88];
};

// Why a communicator is broken. Fixed size: it lives in shared memory.
struct FailureText {
  int32_t origin;  // the global rank that found it
  char kind[16];
  char expected[512];
  char got[2048];
  char remedy[512];
};

class Failure : public std::exception {
 public:
  Failure(std::string kind, int origin, std::string expected, std::string got, std::string remedy);
  explicit Failure(const FailureText& text);
  void write(FailureText& text) const;
  const char* what() const noexcept override { return got.c_str(); }

  std::string kind;  // "dead", "closed", "mismatch", "timeout", "aborted", "interrupted"
  int origin;
  std::string expected, got, remedy;
};

enum class Presence : uint32_t { absent, present, closed };

// Which counter of a peer a sleeping rank waits for, so that it is not woken for the other.
enum class Counter : uint32_t { none, posted, consumed };

struct Post {
  alignas(64) std::atomic<uint64_t> posted;    // rounds whose slot this rank has filled
  alignas(64) std::atomic<uint64_t> consumed;  // rounds this rank has read to the end
  alignas(64) Word bell;                       // rung when something this rank waits for may have happened
  std::atomic<Counter> asleep;
  alignas(64) std::atomic<Presence> presence;
  std::atomic<uint64_t> started, finished;  // sequence numbers
  std::atomic<uint32_t> inside;             // within an operation, and perhaps at work on a peer's buffer
  Signature signatures[2];                  // of sequence number s at [s % 2], like its window
  Window windows[2];                        // where this rank's buffer can be read in place
};

struct Header {
  uint64_t magic;
  uint64_t nonce;  // the same on all ranks, so that a stale address cannot attach to another region
  uint32_t size;
  uint64_t slot_bytes;
  std::atomic<uint32_t> attached;
  std::atomic<uint32_t> failed;  // 0 no, 1 being written, 2 yes
  FailureText failure;
};

class Region {
 public:
  // Plain memory, for ranks that are threads.
  static std::shared_ptr<Region> in_threads(int size, size_t slot_bytes);
  // A new region for processes; `named`: a named object in place of a memfd.
  static std::shared_ptr<Region> create(int size, size_t slot_bytes, uint64_t nonce, bool named);
  // The region another process made; Error::Collective where it cannot be opened or is another one.
  static std::shared_ptr<Region> open(const std::string& address, int size, size_t slot_bytes, uint64_t nonce);

  Region(const Region&) = delete;
  ~Region();

  const std::string& address() const { return address_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return slot_bytes_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Post& post(int index) const;
  std::byte* slot(int index, uint64_t round) const;

  void arrive(int index);  // each rank once
  void leave(int index);   // also of a rank that never arrived
  bool inherited() const;  // this process is a fork of the one that opened it
  void ring(int index) const;
  void ring_all() const;

  // The first failure stays; true once it can be read.
  void fail(const Failure& failure);
  bool failed() const { return header().failed.load(std::memory_order_acquire) == 2; }
  Failure failure() const { return Failure(header().failure); }

 private:
  Region(int size, size_t slot_bytes);
  size_t bytes() const;
  void map(int fd);
  void initialise(uint64_t nonce);

  const pid_t pid_;
  int size_;
  size_t slot_bytes_;
  std::byte* base_ = nullptr;
  int fd_ = -1;  // kept open by the maker: peers open it through /proc
  std::string address_;
};

}  // namespace npuzero::comm
