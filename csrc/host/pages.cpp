#include "host/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/check.h"

namespace npuzero::host {
namespace {

constexpr size_t pieces_per_slab = 16;

static_assert(granule_bytes >> (piece_sizes - 1) == part_bytes);

size_t rounded(size_t bytes) { return (bytes + part_bytes - 1) / part_bytes * part_bytes; }

// Address space, aligned to granules; memory comes with the first touch.
std::byte* reserve(size_t bytes) {
  void* found =
      mmap(nullptr, bytes + granule_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) {
    throw Error(Error::Kind::OutOfSpace, "host memory", "room for " + std::to_string(bytes) + " bytes",
                std::strerror(errno), "Shard more of the state (a higher preset), or use more ranks.");
  }
  auto* begin = static_cast<std::byte*>(found);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % granule_bytes;
  if (before != 0) munmap(begin, before);
  if (before != granule_bytes) munmap(begin + before + bytes, granule_bytes - before);
  return begin + before;
}

// The old range stays mapped, without pages.
bool move(std::byte* from, std::byte* to, size_t bytes) {
#ifdef MREMAP_DONTUNMAP
  constexpr int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  return mremap(from, bytes, bytes, flags, to) != MAP_FAILED;
#else
  return from == to;
#endif
}

}  // namespace

Stock::~Stock() {
  for (const auto& [slab, bytes] : slabs_) munmap(slab, bytes);
}

std::byte* Stock::take(size_t halvings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::byte*>& idle = idle_[halvings];
  if (idle.empty()) {
    const size_t piece = granule_bytes >> halvings, bytes = pieces_per_slab * piece;
    std::byte* slab = reserve(bytes);
    slabs_.emplace_back(slab, bytes);
    // A part must stay one: where huge pages are for all, the first touch would make a whole one of it.
    madvise(slab, bytes, halvings == 0 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (size_t i = pieces_per_slab; i > 0; --i) idle.push_back(slab + (i - 1) * piece);
  }
  std::byte* home = idle.back();
  idle.pop_back();
  return home;
}

void Stock::put(std::byte* home, size_t halvings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_[halvings].push_back(home);
}

void Stock::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t halvings = 0; halvings < piece_sizes; ++halvings) {
    for (std::byte* home : idle_[halvings]) madvise(home, granule_bytes >> halvings, MADV_DONTNEED);
  }
}

Pages::Pages(std::shared_ptr<Stock> stock, size_t bytes) : stock_(std::move(stock)), bytes_(bytes) {
  if (bytes_ != 0) base_ = reserve(rounded(bytes_));
}

Pages::~Pages() {
  release();
  if (base_ != nullptr) munmap(base_, rounded(bytes_));
}

void Pages::restore() {
  size_t left = rounded(bytes_) - here_bytes_;
  for (size_t halvings = 0; left != 0; ++halvings) {
    for (const size_t piece = granule_bytes >> halvings; piece <= left; left -= piece) {
      std::byte* home = stock_->take(halvings);
      move(home, base_ + here_bytes_, piece);  // else the range takes fresh pages when it is touched
      pieces_.push_back({home, halvings});
      here_bytes_ += piece;
    }
  }
}

void Pages::release() {
  while (!pieces_.empty()) {
    const auto [home, halvings] = pieces_.back();
    const size_t piece = granule_bytes >> halvings;
    here_bytes_ -= piece;
    std::byte* here = base_ + here_bytes_;
    if (!move(here, home, piece)) madvise(here, piece, MADV_DONTNEED);
    stock_->put(home, halvings);
    pieces_.pop_back();
  }
}

void vacate(std::byte* begin, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t before = std::min(bytes, -reinterpret_cast<uintptr_t>(begin) % page);
  const size_t whole = (bytes - before) / page * page;
  std::byte* first = begin + before;
  std::memset(begin, 0, before);
  std::memset(first + whole, 0, bytes - before - whole);
  // Of shared memory a hole: others have it mapped, too.
  if (whole == 0 || madvise(first, whole, MADV_REMOVE) == 0) return;
  if (madvise(first, whole, MADV_DONTNEED) != 0) std::memset(first, 0, whole);
}

}  // namespace npuzero::host
