#include "comm/arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <new>
#include <random>
#include <string>

namespace npuzero::comm {
namespace {

constexpr size_t page = 4096;
constexpr size_t huge_page = 2 << 20;
constexpr size_t first_extent = size_t{1} << 30;

size_t rounded(size_t bytes, size_t unit) { return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit; }

// The file, at an address that allows huge pages; null where it cannot be mapped.
std::byte* map_file(int fd, size_t bytes) {
  void* room = mmap(nullptr, bytes + huge_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(room), aligned = rounded(begin, huge_page);
  if (aligned > begin) munmap(room, aligned - begin);
  munmap(reinterpret_cast<void*>(aligned + bytes), begin + huge_page - aligned);
  void* memory = mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) {
    munmap(reinterpret_cast<void*>(aligned), bytes);
    return nullptr;
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: fewer page faults where the host allows it
  return static_cast<std::byte*>(memory);
}

// It lives as long as the process: tensors in it may outlive everything else.
std::atomic<Arena*> own_arena{nullptr};
std::mutex making, mapping;

const int watching_forks = pthread_atfork(nullptr, nullptr, Arena::after_fork);

}  // namespace

Arena& Arena::own() {
  std::lock_guard<std::mutex> lock(making);
  Arena* arena = own_arena.load();
  if (arena == nullptr) own_arena.store(arena = new Arena);
  return *arena;
}

// Only the calling thread is left, so nobody holds the locks. The blocks stay where they are, now private.
void Arena::after_fork() {
  new (&making) std::mutex;
  new (&mapping) std::mutex;
  const Arena* parents = own_arena.exchange(nullptr);
  if (parents == nullptr || parents->extent_ == 0) return;
  mmap(parents->base_, parents->extent_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, parents->fd_,
       0);
}

Arena::Arena() : pid_(getpid()) {
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  capacity_ = rounded(2 * memory, first_extent);
  std::random_device random;
  nonce_ = static_cast<uint64_t>(random()) << 32 | random();
  fd_ = memfd_create("npuzero-arena", MFD_CLOEXEC);
  base_ = fd_ < 0 ? nullptr : map_file(fd_, capacity_);
}

std::byte* Arena::allocate(size_t bytes) {
  if (base_ == nullptr || bytes > capacity_) throw std::bad_alloc();
  const size_t size = rounded(bytes, page);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto fits = [size](const auto& gap) { return gap.second >= size; };
  auto gap = std::find_if(free_.begin(), free_.end(), fits);
  if (gap == free_.end()) {
    size_t extent = std::max(first_extent, extent_);
    while (extent - extent_ < size && extent < capacity_) extent = std::min(2 * extent, capacity_);
    if (extent - extent_ < size || ftruncate(fd_, static_cast<off_t>(extent)) != 0) throw std::bad_alloc();
    const bool touches = !free_.empty() && free_.rbegin()->first + free_.rbegin()->second == extent_;
    if (touches) {
      free_.rbegin()->second += extent - extent_;
    } else {
      free_[extent_] = extent - extent_;
    }
    extent_ = extent;
    gap = std::prev(free_.end());
  }
  const auto [offset, room] = *gap;
  free_.erase(gap);
  if (room > size) free_[offset + size] = room - size;
  return base_ + offset;
}

void Arena::free(std::byte* block, size_t bytes) {
  if (pid_ != getpid()) return;  // a forked child's copy of what is its parent's
  const auto begin = static_cast<size_t>(block - base_);
  const size_t size = rounded(bytes, page);
  std::lock_guard<std::mutex> lock(mutex_);
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin), static_cast<off_t>(size));
  auto here = free_.emplace(begin, size).first;
  const auto after = std::next(here);
  if (after != free_.end() && begin + size == after->first) {
    here->second += after->second;
    free_.erase(after);
  }
  if (here == free_.begin()) return;
  const auto before = std::prev(here);
  if (before->first + before->second == begin) {
    before->second += here->second;
    free_.erase(here);
  }
}

Window Arena::find(const void* data, size_t bytes) {
  Arena* arena = own_arena.load();
  if (arena == nullptr) return Window{};
  const auto begin = reinterpret_cast<uintptr_t>(data), base = reinterpret_cast<uintptr_t>(arena->base_);
  std::lock_guard<std::mutex> lock(arena->mutex_);
  if (begin < base || begin + bytes > base + arena->extent_) return Window{};
  return Window{Window::arena, arena->fd_, arena->nonce_, arena->extent_, begin - base};
}

std::shared_ptr<Mapping> Mapping::of(pid_t pid, const Window& window) {
  static auto* mappings = new std::map<uint64_t, std::weak_ptr<Mapping>>;
  std::lock_guard<std::mutex> lock(mapping);
  std::weak_ptr<Mapping>& known = (*mappings)[window.nonce];
  std::shared_ptr<Mapping> mapping = known.lock();
  if (mapping && mapping->covers(window)) return mapping;
  const int fd =
      ::open(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(window.fd)).c_str(), O_RDWR | O_CLOEXEC);
  std::byte* base = fd < 0 ? nullptr : map_file(fd, window.extent);
  const int reason = errno;
  if (fd >= 0) ::close(fd);
  errno = reason;
  if (base == nullptr) return nullptr;
  mapping.reset(new Mapping(window, base));
  known = mapping;
  return mapping;
}

Mapping::~Mapping() { munmap(base_, extent_); }

}  // namespace npuzero::comm
