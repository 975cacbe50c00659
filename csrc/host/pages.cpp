#include "host/pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/check.h"

namespace npuzero::host {
namespace {

constexpr size_t granules_per_slab = 16;

size_t rounded(size_t bytes) { return (bytes + granule_bytes - 1) / granule_bytes * granule_bytes; }

// Address space, aligned to granules; memory comes with the first touch.
std::byte* reserve(size_t bytes) {
  void* found =
      mmap(nullptr, bytes + granule_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) {
    throw Error(Error::Kind::OutOfSpace, "host memory", "room for " + std::to_string(bytes) + " bytes",
                std::strerror(errno), "Cut more of the state (a higher preset), or use more ranks.");
  }
  auto* begin = static_cast<std::byte*>(found);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % granule_bytes;
  if (before != 0) munmap(begin, before);
  if (before != granule_bytes) munmap(begin + before + bytes, granule_bytes - before);
  return begin + before;
}

// The old range stays mapped, without pages.
bool move(std::byte* from, std::byte* to) {
#ifdef MREMAP_DONTUNMAP
  constexpr int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  return mremap(from, granule_bytes, granule_bytes, flags, to) != MAP_FAILED;
#else
  return from == to;
#endif
}

}  // namespace

Stock::~Stock() {
  for (std::byte* slab : slabs_) munmap(slab, granules_per_slab * granule_bytes);
}

std::byte* Stock::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.empty()) {
    slabs_.push_back(reserve(granules_per_slab * granule_bytes));
    madvise(slabs_.back(), granules_per_slab * granule_bytes, MADV_HUGEPAGE);
    for (size_t i = granules_per_slab; i > 0; --i) idle_.push_back(slabs_.back() + (i - 1) * granule_bytes);
  }
  std::byte* home = idle_.back();
  idle_.pop_back();
  return home;
}

void Stock::put(std::byte* home) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(home);
}

Pages::Pages(std::shared_ptr<Stock> stock, size_t bytes) : stock_(std::move(stock)), bytes_(bytes) {
  if (bytes_ != 0) base_ = reserve(rounded(bytes_));
}

Pages::~Pages() {
  release();
  if (base_ != nullptr) munmap(base_, rounded(bytes_));
}

void Pages::restore() {
  while (homes_.size() * granule_bytes < bytes_) {
    std::byte* home = stock_->take();
    move(home, base_ + homes_.size() * granule_bytes);  // else the range takes fresh pages when it is touched
    homes_.push_back(home);
  }
}

void Pages::release() {
  while (!homes_.empty()) {
    std::byte* here = base_ + (homes_.size() - 1) * granule_bytes;
    if (!move(here, homes_.back())) madvise(here, granule_bytes, MADV_DONTNEED);
    stock_->put(homes_.back());
    homes_.pop_back();
  }
}

}  // namespace npuzero::host
