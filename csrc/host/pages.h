// Pages: host memory at a fixed address whose physical pages come and go.
//
// A released range keeps its address (tensors and autograd's references to it stay valid) and gives its pages to a
// common stock; a restored one takes pages out of it. Pages move between the two by mremap, which changes page tables
// and copies nothing. Memory fresh from the kernel is zeroed page by page and far slower than memory that is used
// again: a unit that is gathered anew in each step must not pay for that.
//
// Invariants:
//   - a range takes its pages in pieces: granules, and for what is left at its end halves, quarters... of one; each
//   piece
//     has a home in the stock, empty while its pages are lent
//   - the contents of a restored range are undefined
//   - where pages cannot be moved (an older kernel, too many mappings) they go back to the kernel instead
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace npuzero::host {

// A huge page: it moves as one entry of a page table. Parts of one are small pages, of which the smallest part is one
// or some on every system (they have 4, 16 or 64 KiB); half of that is wasted at the end of a range on average.
constexpr size_t granule_bytes = 2 * 1024 * 1024, part_bytes = 64 * 1024;
constexpr size_t piece_sizes = 6;  // granule_bytes, a half of it, ... part_bytes

class Stock {
 public:
  Stock() = default;
  Stock(const Stock&) = delete;
  ~Stock();

  // The home of an idle piece of granule_bytes >> halvings.
  std::byte* take(size_t halvings);
  void put(std::byte* home, size_t halvings);
  // Give the memory of idle pieces back to the system; they stay.
  void trim();

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<std::byte*, size_t>> slabs_;  // and their bytes
  std::array<std::vector<std::byte*>, piece_sizes> idle_;
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
  struct Piece {
    std::byte* home;
    size_t halvings;
  };

  const std::shared_ptr<Stock> stock_;
  const size_t bytes_;
  std::byte* base_ = nullptr;
  size_t here_bytes_ = 0;      // at the base, in pieces
  std::vector<Piece> pieces_;  // whose pages are here
};

// Give the memory of a range back to the system: of its whole pages, be they this process's own or shared. The range
// stays, and is zero.
void vacate(std::byte* begin, size_t bytes);

}  // namespace npuzero::host
