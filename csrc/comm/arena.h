// Arena: memory of this process that the ranks of its host can read, and write, in place.
//
// One anonymous file per process, mapped once and handed out in blocks of whole pages. A block comes zeroed; freeing it
// punches a hole in the file, which gives its memory back whoever has it mapped. The file has no name, so nothing stays
// behind. Peers map all of it when they first meet a buffer in it, and again when it has grown.
//
// A forked child has its parent's arena as a copy on write: what it writes there no rank sees, and its own blocks lie
// in an arena of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace npuzero::comm {

// Where peers find a buffer: at an offset of its process's arena, or, where ranks are threads, at its address.
struct Window {
  enum Place : uint32_t { none, arena, address };
  Place place;
  int32_t fd;       // of the arena, in the process that owns it
  uint64_t nonce;   // of the arena, so that a reused process id is not mistaken for the old one
  uint64_t extent;  // bytes of the arena's file
  uint64_t at;
};

class Arena {
 public:
  // That of this process, made when first asked for.
  static Arena& own();
  // Where peers find `bytes` at `data`: Window::none unless all of them are in this process's arena.
  static Window find(const void* data, size_t bytes);

  // A block of at least one page, zeroed; std::bad_alloc where no memory is left.
  std::byte* allocate(size_t bytes);
  void free(std::byte* block, size_t bytes);

  static void after_fork();  // in the child

 private:
  Arena();

  const pid_t pid_;
  std::mutex mutex_;
  int fd_ = -1;
  uint64_t nonce_ = 0;
  std::byte* base_ = nullptr;
  size_t capacity_ = 0, extent_ = 0;  // addresses kept free for it; bytes the file has
  std::map<size_t, size_t> free_;     // offset -> bytes, never two that touch
};

// A peer's arena, mapped here; once for all communicators, as long as one of them uses it.
class Mapping {
 public:
  // Null where it cannot be opened or mapped: errno says why.
  static std::shared_ptr<Mapping> of(pid_t pid, const Window& window);
  Mapping(const Mapping&) = delete;
  ~Mapping();

  bool covers(const Window& window) const { return window.nonce == nonce_ && window.extent <= extent_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }

 private:
  Mapping(const Window& window, std::byte* base) : nonce_(window.nonce), extent_(window.extent), base_(base) {}

  const uint64_t nonce_, extent_;
  std::byte* const base_;
};

}  // namespace npuzero::comm
