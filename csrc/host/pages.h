// Pages: host memory at a fixed address whose physical pages come and go.
//
// A released range keeps its address (tensors and autograd's references to it stay valid) and gives its pages to a
// common stock; a restored one takes pages out of it. Pages move between the two by mremap, which changes page tables
// and copies nothing. Memory fresh from the kernel is zeroed page by page and far slower than memory that is used
// again: a unit that is gathered anew in each step must not pay for that.
//
// Invariants:
//   - a range takes pages in granules; each granule has a home in the stock, empty while its pages are lent
//   - the contents of a restored range are undefined
//   - where pages cannot be moved (an older kernel, too many mappings) they go back to the kernel instead
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace npuzero::host {

// A huge page: it moves as one entry of a page table. The end of a range wastes half of it on average.
constexpr size_t granule_bytes = 2 * 1024 * 1024;

class Stock {
 public:
  Stock() = default;
  Stock(const Stock&) = delete;
  ~Stock();

  std::byte* take();  // an idle granule's home
  void put(std::byte* home);

 private:
  mutable std::mutex mutex_;
  std::vector<std::byte*> slabs_, idle_;
};

class Pages {
 public:
  // Error::OutOfSpace where the address space is spent. Released at first.
  Pages(std::shared_ptr<Stock> stock, size_t bytes);
  Pages(const Pages&) = delete;
  ~Pages();

  std::byte* data() const { return base_; }
  size_t bytes() const { return bytes_; }
  void restore();
  void release();

 private:
  const std::shared_ptr<Stock> stock_;
  const size_t bytes_;
  std::byte* base_ = nullptr;
  std::vector<std::byte*> homes_;  // of the pages that are here
};

}  // namespace npuzero::host
