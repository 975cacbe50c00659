#include "comm/verbs.h"

#include <algorithm>
#include <cstring>

#include "comm/copy.h"
#include "comm/sum.h"

namespace npuzero::comm {
namespace {

constexpr size_t piece_bytes = 8 << 10;  // of several buffers at once, so that they stay in the first-level cache

uint64_t ceiling(size_t n, size_t chunk) { return (n + chunk - 1) / chunk; }

}  // namespace

Verbs::Verbs(const Group& group, Peers& peers)
    : group_(group), peers_(peers), buffers_(group, peers), index_(group.index), size_(group.size), sources_(size_) {}

void Verbs::run(const Request& request, uint64_t sequence) {
  peers_.begin(request, sequence, buffers_.offer(request));
  // Of nothing there is no address: the ranks only meet, and compare what each said.
  switch (request.numel == 0 ? Verb::barrier : request.verb) {
    case Verb::all_gather: all_gather(request); break;
    case Verb::reduce_scatter: reduce_scatter(request); break;
    case Verb::all_reduce: all_reduce(request); break;
    case Verb::all_to_all: all_to_all(request); break;
    case Verb::broadcast:
    case Verb::send: broadcast(request); break;
    case Verb::barrier: meet(); break;
  }
  if (buffers_.offered()) peers_.await_all(Counter::consumed, round_);
  peers_.finish();
}

// fill(t, round) writes this rank's slot, unless its buffer is read in place; read(t, round) reads the peers' slots or
// buffers, each once it is posted.
template <class Fill, class Read>
void Verbs::rounds(uint64_t count, Fill fill, Read read) {
  const uint64_t base = round_;
  const auto fill_and_post = [&](uint64_t t) {
    if (!buffers_.offered() && base + t >= slots_per_rank)
      peers_.await_all(Counter::consumed, base + t - slots_per_rank + 1);
    fill(t, base + t);
    if (!buffers_.offered()) peers_.post(base + t + 1);
  };
  if (buffers_.offered()) peers_.post(base + count);  // all of it is there
  fill_and_post(0);
  for (uint64_t t = 0; t < count; ++t) {
    if (t + 1 < count) fill_and_post(t + 1);  // before this round is read: peers copy meanwhile
    if (t == 0) {
      peers_.await_all(Counter::posted, base + 1);
      peers_.compare_signatures();
      buffers_.open();
    }
    read(t, base + t);
    // A buffer read in place may have been freed after its rank failed: then what was read is worth nothing.
    if (buffers_.any() && group_.region->failed()) throw group_.region->failure();
    // Slots are filled again round by round. Buffers are waited for once, to the end: a word before would only wake who
    // sleeps, and take a core from compute.
    if (!buffers_.every_peers() || t + 1 == count) peers_.consume(base + t + 1);
  }
  round_ = base + count;
}

void Verbs::meet() {
  rounds(1, [](uint64_t, uint64_t) {}, [](uint64_t, uint64_t) {});
}

std::byte* Verbs::part(int writer, int reader, uint64_t round, size_t part_bytes) const {
  return slot(writer, round) + (reader < writer ? reader : reader - 1) * part_bytes;
}

size_t Verbs::part_numel(size_t itemsize) const {
  return group_.region->slot_bytes() / std::max(1, size_ - 1) / 64 * 64 / itemsize;
}

template <class Theirs>
const void* const* Verbs::sources(const void* own, Theirs theirs) {
  for (int k = 0; k < size_; ++k) sources_[k] = group_.order[k] == index_ ? own : theirs(group_.order[k]);
  return sources_.data();
}

void Verbs::all_gather(const Request& request) {
  const size_t n = request.numel * request.itemsize, chunk = group_.region->slot_bytes();
  std::byte* own = request.out + index_ * n;
  const bool streaming = n * size_ >= stream_bytes;
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        if (!buffers_.offered()) std::memcpy(slot(index_, round), request.in + t * chunk, extent(t));
        if (own != request.in) copy(own + t * chunk, request.in + t * chunk, extent(t), streaming);
      },
      [&](uint64_t t, uint64_t round) {
        for (int step = 1; step < size_; ++step) {
          const int peer = (index_ + step) % size_;
          peers_.await(Counter::posted, peer, round + 1);
          const std::byte* from = buffers_.of(peer) ? buffers_.of(peer) + t * chunk : slot(peer, round);
          copy(request.out + peer * n + t * chunk, from, extent(t), streaming);
        }
      });
}

void Verbs::reduce_scatter(const Request& request) {
  const size_t chunk = part_numel(request.itemsize), item = request.itemsize, n = request.numel;
  const size_t result_item = static_cast<size_t>(itemsize(request.result));
  // Not where the result's memory has just been read anyway.
  const bool own_part = request.out == request.in + index_ * n * item;
  const bool streaming = !request.accumulate && !own_part && n * result_item >= stream_bytes;
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        for (int peer = 0; peer < size_ && !buffers_.offered(); ++peer) {
          if (peer == index_) continue;
          std::memcpy(part(index_, peer, round, chunk * item), request.in + (peer * n + t * chunk) * item,
                      extent(t) * item);
        }
      },
      [&](uint64_t t, uint64_t round) {
        peers_.await_all(Counter::posted, round + 1);
        const size_t offset = (index_ * n + t * chunk) * item;
        const void* const* from = sources(request.in + offset, [&](int peer) {
          return buffers_.of(peer) ? buffers_.of(peer) + offset : part(peer, index_, round, chunk * item);
        });
        sum(request.out + t * chunk * result_item, request.result, from, size_, request.wire, extent(t),
            request.accumulate, streaming);
      });
}

// One slot holds it: each rank posts all it has, and sums everything.
void Verbs::all_reduce_small(const Request& request) {
  rounds(
      1,
      [&](uint64_t, uint64_t round) {
        std::memcpy(slot(index_, round), request.out, request.numel * request.itemsize);
      },
      [&](uint64_t, uint64_t round) {
        const void* const* from = sources(request.out, [&](int peer) { return slot(peer, round); });
        sum(request.out, request.wire, from, size_, request.wire, request.numel, false, false);
      });
}

void Verbs::all_reduce(const Request& request) {
  // What goes by one slot must lie below what is read in place.
  const size_t most = std::min(in_place_bytes, group_.region->slot_bytes() / 8);
  if (request.numel * request.itemsize < most) return all_reduce_small(request);
  meet();  // only now it is known whether all buffers can be reached: all ranks must go the same way
  if (buffers_.offered() && buffers_.every_peers()) return all_reduce_in_place(request);
  buffers_.withdraw();  // also of those ranks that could: their peers wait for slots now
  all_reduce_slots(request);
}

// Each rank sums its range of all buffers, and writes the sum into all of them.
void Verbs::all_reduce_in_place(const Request& request) {
  const size_t item = request.itemsize, most = piece_bytes / item;
  const size_t each = ceiling(ceiling(request.numel, size_), 64) * 64;  // no cache line is of two ranks
  const size_t first = std::min(each * index_, request.numel), last = std::min(first + each, request.numel);
  rounds(
      1, [](uint64_t, uint64_t) {},
      [&](uint64_t, uint64_t) {
        for (size_t begin = first; begin < last; begin += most) {
          const size_t count = std::min(most, last - begin);
          std::byte* own = request.out + begin * item;
          const void* const* from = sources(own, [&](int peer) { return buffers_.of(peer) + begin * item; });
          sum(own, request.wire, from, size_, request.wire, count, false, false);
          for (int peer = 0; peer < size_; ++peer) {
            if (peer != index_) std::memcpy(buffers_.of(peer) + begin * item, own, count * item);
          }
        }
      });
}

// Blocks of one part per rank: each rank sums its part of a block, and the parts are gathered. Scattering of block b +
// 1 comes before gathering of block b, so that a round's fill never waits for its own read:
//   round 0: scatter 0; 1: scatter 1; 2: gather 0; 3: scatter 2; 4: gather 1; ...
void Verbs::all_reduce_slots(const Request& request) {
  const size_t item = request.itemsize, most = part_numel(item), part_bytes = most * item;
  const uint64_t blocks = ceiling(request.numel, most * size_);
  struct Range {
    std::byte* data;
    size_t numel;
  };
  const auto range = [&](uint64_t block, int peer) {
    const size_t begin = block * most * size_, numel = std::min(most * size_, request.numel - begin);
    const size_t each = ceiling(numel, size_), from = std::min(each * peer, numel);
    return Range{request.out + (begin + from) * item, std::min(each, numel - from)};
  };
  const auto scatters = [](uint64_t t) { return t == 0 || t % 2 == 1; };
  const auto block_of = [](uint64_t t) { return t == 0 ? 0 : t % 2 == 1 ? (t + 1) / 2 : t / 2 - 1; };
  rounds(
      2 * blocks + 1,
      [&](uint64_t t, uint64_t round) {
        const uint64_t block = block_of(t);
        if (block >= blocks) return;
        if (!scatters(t)) {
          const Range own = range(block, index_);
          std::memcpy(slot(index_, round), own.data, own.numel * item);
          return;
        }
        for (int peer = 0; peer < size_; ++peer) {
          const Range theirs = range(block, peer);
          if (peer != index_) std::memcpy(part(index_, peer, round, part_bytes), theirs.data, theirs.numel * item);
        }
      },
      [&](uint64_t t, uint64_t round) {
        const uint64_t block = block_of(t);
        if (block >= blocks) return;
        peers_.await_all(Counter::posted, round + 1);
        if (scatters(t)) {
          const Range own = range(block, index_);
          const void* const* from = sources(own.data, [&](int peer) { return part(peer, index_, round, part_bytes); });
          sum(own.data, request.wire, from, size_, request.wire, own.numel, false, false);
          return;
        }
        for (int peer = 0; peer < size_; ++peer) {
          const Range theirs = range(block, peer);
          if (peer != index_) std::memcpy(theirs.data, slot(peer, round), theirs.numel * item);
        }
      });
}

void Verbs::all_to_all(const Request& request) {
  const size_t n = request.numel * request.itemsize, chunk = part_numel(1);
  const bool streaming = n * size_ >= stream_bytes;
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        for (int peer = 0; peer < size_; ++peer) {
          const std::byte* from = request.in + peer * n + t * chunk;
          std::byte* to = peer == index_ ? request.out + peer * n + t * chunk : part(index_, peer, round, chunk);
          if (peer == index_ || !buffers_.offered()) copy(to, from, extent(t), streaming && peer == index_);
        }
      },
      [&](uint64_t t, uint64_t round) {
        for (int step = 1; step < size_; ++step) {
          const int peer = (index_ + step) % size_;
          peers_.await(Counter::posted, peer, round + 1);
          const std::byte* from =
              buffers_.of(peer) ? buffers_.of(peer) + index_ * n + t * chunk : part(peer, index_, round, chunk);
          copy(request.out + peer * n + t * chunk, from, extent(t), streaming);
        }
      });
}

void Verbs::broadcast(const Request& request) {
  const size_t n = request.numel * request.itemsize, chunk = group_.region->slot_bytes();
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  const bool root = request.root == index_;
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        if (root && !buffers_.offered()) std::memcpy(slot(index_, round), request.out + t * chunk, extent(t));
      },
      [&](uint64_t t, uint64_t round) {
        if (root) return;
        peers_.await(Counter::posted, request.root, round + 1);
        const std::byte* theirs = buffers_.of(request.root);
        std::memcpy(request.out + t * chunk, theirs ? theirs + t * chunk : slot(request.root, round), extent(t));
      });
}

}  // namespace npuzero::comm
