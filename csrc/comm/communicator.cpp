#include "comm/communicator.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

#include "comm/copy.h"
#include "comm/sum.h"
#include "core/check.h"

namespace npuzero::comm {
namespace {

constexpr int slice_ms = 50;                 // a sleeping rank looks this often whether its peers live
constexpr size_t in_place_bytes = 64 << 10;  // from here on a copy costs more than waiting for all to have read
constexpr size_t piece_bytes = 8 << 10;      // of several buffers at once, so that they stay in the first-level cache
constexpr auto patience = std::chrono::microseconds(50);  // of looking again before sleeping

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

uint64_t ceiling(size_t n, size_t chunk) { return (n + chunk - 1) / chunk; }

std::string describe(const Signature& signature) {
  std::ostringstream text;
  text << name(static_cast<Verb>(signature.verb)) << " #" << signature.sequence;
  if (static_cast<Verb>(signature.verb) != Verb::barrier) text << " of " << signature.numel << " " << signature.dtype;
  if (static_cast<Verb>(signature.verb) == Verb::broadcast) text << " from position " << signature.root;
  if (signature.tag[0] != '\0') text << " tagged '" << signature.tag << "'";
  return text.str();
}

template <size_t N>
void set_text(char (&to)[N], const std::string& from) {
  std::memset(to, 0, N);
  std::memcpy(to, from.data(), std::min(from.size(), N - 1));
}

bool same(const Signature& a, const Signature& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

Failure closed_here(int rank) {
  return Failure("closed", rank, "an open communicator", "one that this rank has closed",
                 "Wait for every handle before closing.");
}

}  // namespace

const char* name(Verb verb) {
  constexpr const char* names[] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier"};
  return names[static_cast<int>(verb)];
}

Communicator::Communicator(std::shared_ptr<Region> region, int index, std::vector<int> ranks, std::vector<int> pids,
                           std::string name, double timeout_s)
    : region_(std::move(region)),
      index_(index),
      size_(static_cast<int>(ranks.size())),
      ranks_(std::move(ranks)),
      name_(std::move(name)),
      timeout_s_(timeout_s),
      order_(size_),
      sources_(size_),
      threads_(pids.empty()),
      pids_(std::move(pids)),
      mappings_(size_),
      crowded_(size_ > cores()),
      theirs_(size_) {
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [this](int a, int b) { return ranks_[a] < ranks_[b]; });
  for (int peer = 0; peer < size_; ++peer) pulses_.emplace_back(threads_ || peer == index_ ? 0 : pids_[peer]);
  region_->arrive(index_);
}

Communicator::~Communicator() { close(); }

// --- submission ------------------------------------------------------------------------------------------------------

void Communicator::check_process() const {
  if (!inherited()) return;
  throw Error(
      Error::Kind::State, "communicator '" + name_ + "' on rank " + std::to_string(ranks_[index_]),
      "the process that opened it", "a forked child of that process",
      "A world does not survive a fork: compute in a world of one there (npuzero.comm.SingleWorld()), or let the "
      "launcher start the process.");
}

OperationPointer Communicator::submit(Request request) {
  check_process();
  auto operation = std::make_shared<Operation>();
  operation->request = std::move(request);
  operation->owner = this;
  std::lock_guard<std::mutex> lock(mutex_);
  operation->sequence = ++submitted_;
  if (closing_ || region_->failed()) {
    operation->failure = region_->failed() ? region_->failure() : closed_here(ranks_[index_]);
    operation->refused = operation->done = true;
    return operation;
  }
  if (!thread_.joinable()) {
    // Signals are the main thread's: it may hold the handler of an interpreter.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { progress(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  queue_.push_back(operation);
  // A barrier is waited for at once, by a thread that will run it: waking another would only disturb.
  if (operation->request.verb != Verb::barrier) changed_.notify_all();
  return operation;
}

void Communicator::run_front(std::unique_lock<std::mutex>& lock) {
  busy_ = true;
  const OperationPointer operation = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  std::optional<Failure> failure;
  operation->begin = Clock::now();
  try {
    execute(*operation);
  } catch (const Failure& found) {
    failure = found;
    leave_peers_buffers();
  }
  operation->end = Clock::now();
  lock.lock();
  operation->failure = std::move(failure);
  operation->done = true;
  busy_ = false;
  changed_.notify_all();
}

void Communicator::progress() {
  pthread_setname_np(pthread_self(), "npuzero-comm");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || (!busy_ && !queue_.empty()); });
    if (closing_) return;
    run_front(lock);
  }
}

bool Communicator::wait(const OperationPointer& operation, const std::function<bool()>& interrupted) {
  check_process();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!operation->done) {
    if (!busy_ && !queue_.empty() && !closing_) {
      interrupted_ = &interrupted;
      run_front(lock);
      interrupted_ = nullptr;
    } else if (changed_.wait_for(lock, std::chrono::milliseconds(slice_ms)) == std::cv_status::timeout) {
      lock.unlock();
      if (interrupted()) return false;
      lock.lock();
    }
  }
  return true;
}

bool Communicator::done(const OperationPointer& operation) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  return operation->done;
}

void Communicator::abort(const Failure& why) { region_->fail(why); }

void Communicator::close() {
  if (inherited()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closing_.exchange(true)) {
    region_->leave(index_);
    changed_.notify_all();
  }
  changed_.wait(lock, [this] { return !busy_; });
  for (const OperationPointer& operation : queue_) {
    operation->failure = closed_here(ranks_[index_]);
    operation->done = true;
  }
  queue_.clear();
  changed_.notify_all();
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
}

// --- verbs -----------------------------------------------------------------------------------------------------------

void Communicator::execute(Operation& operation) {
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  Post& mine = region_->post(index_);
  mine.inside.store(1, std::memory_order_seq_cst);
  if (region_->failed()) throw region_->failure();
  sign(operation);
  const Request& request = operation.request;
  switch (request.verb) {
    case Verb::all_gather: all_gather(request); break;
    case Verb::reduce_scatter: reduce_scatter(request); break;
    case Verb::all_reduce: {
      // What goes by one slot must lie below what is read in place.
      const size_t bytes = request.numel * request.itemsize, most = std::min(in_place_bytes, region_->slot_bytes() / 8);
      bytes < most ? all_reduce_small(request) : all_reduce_large(request);
      break;
    }
    case Verb::all_to_all: all_to_all(request); break;
    case Verb::broadcast: broadcast(request); break;
    case Verb::barrier: meet(); break;
  }
  if (in_place_) await_all(Counter::consumed, round_);
  mine.finished.store(operation.sequence, std::memory_order_release);
  mine.inside.store(0, std::memory_order_release);
}

// After a failure a caller may free its buffer. Peers that are threads may still be at work on it: none begins once the
// failure is known, and those that did are waited for. (What processes share stays mapped: see Arena.)
void Communicator::leave_peers_buffers() {
  region_->post(index_).inside.store(0, std::memory_order_seq_cst);
  if (!threads_) return;
  for (int peer = 0; peer < size_; ++peer) {
    while (region_->post(peer).inside.load(std::memory_order_seq_cst) != 0) sched_yield();
  }
}

// fill(t, round) writes this rank's slot, unless its buffer is read in place; read(t, round) reads the peers' slots or
// buffers, each once it is posted.
template <class Fill, class Read>
void Communicator::rounds(uint64_t count, Fill fill, Read read) {
  const uint64_t base = round_;
  const auto fill_and_post = [&](uint64_t t) {
    if (!in_place_ && base + t >= slots_per_rank) await_all(Counter::consumed, base + t - slots_per_rank + 1);
    fill(t, base + t);
    if (!in_place_) post(base + t + 1);
  };
  if (in_place_) post(base + count);
  fill_and_post(0);
  for (uint64_t t = 0; t < count; ++t) {
    if (t + 1 < count) fill_and_post(t + 1);
    if (t == 0) {
      await_all(Counter::posted, base + 1);
      compare_signatures();
      open_windows();
    }
    read(t, base + t);
    // A buffer read in place may have been freed after its rank failed: then what was read is worth nothing.
    if (reaches_ && region_->failed()) throw region_->failure();
    consume(base + t + 1);
  }
  round_ = base + count;
}

void Communicator::meet() {
  rounds(1, [](uint64_t, uint64_t) {}, [](uint64_t, uint64_t) {});
}

std::byte* Communicator::part(int writer, int reader, uint64_t round, size_t part_bytes) const {
  return region_->slot(writer, round) + (reader < writer ? reader : reader - 1) * part_bytes;
}

size_t Communicator::part_numel(size_t itemsize) const {
  return region_->slot_bytes() / std::max(1, size_ - 1) / 64 * 64 / itemsize;
}

template <class Theirs>
const void* const* Communicator::sources(const void* own, Theirs theirs) {
  for (int k = 0; k < size_; ++k) sources_[k] = order_[k] == index_ ? own : theirs(order_[k]);
  return sources_.data();
}

void Communicator::all_gather(const Request& request) {
  const size_t n = request.numel * request.itemsize, chunk = region_->slot_bytes();
  std::byte* own = request.out + index_ * n;
  const bool streaming = n * size_ >= stream_bytes;
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        if (!in_place_) std::memcpy(region_->slot(index_, round), request.in + t * chunk, extent(t));
        if (own != request.in) copy(own + t * chunk, request.in + t * chunk, extent(t), streaming);
      },
      [&](uint64_t t, uint64_t round) {
        for (int step = 1; step < size_; ++step) {
          const int peer = (index_ + step) % size_;
          await(Counter::posted, peer, round + 1);
          const std::byte* from = theirs_[peer] ? theirs_[peer] + t * chunk : region_->slot(peer, round);
          copy(request.out + peer * n + t * chunk, from, extent(t), streaming);
        }
      });
}

void Communicator::reduce_scatter(const Request& request) {
  const size_t chunk = part_numel(request.itemsize), item = request.itemsize, n = request.numel;
  const size_t result_item = static_cast<size_t>(itemsize(request.result));
  // Not where the result's memory has just been read anyway.
  const bool own_part = request.out == request.in + index_ * n * item;
  const bool streaming = !request.accumulate && !own_part && n * result_item >= stream_bytes;
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        for (int peer = 0; peer < size_ && !in_place_; ++peer) {
          if (peer == index_) continue;
          std::memcpy(part(index_, peer, round, chunk * item), request.in + (peer * n + t * chunk) * item,
                      extent(t) * item);
        }
      },
      [&](uint64_t t, uint64_t round) {
        await_all(Counter::posted, round + 1);
        const size_t offset = (index_ * n + t * chunk) * item;
        const void* const* from = sources(request.in + offset, [&](int peer) {
          return theirs_[peer] ? theirs_[peer] + offset : part(peer, index_, round, chunk * item);
        });
        sum(request.out + t * chunk * result_item, request.result, from, size_, request.wire, extent(t),
            request.accumulate, streaming);
      });
}

// One slot holds it: each rank posts all it has, and sums everything.
void Communicator::all_reduce_small(const Request& request) {
  rounds(
      1,
      [&](uint64_t, uint64_t round) {
        std::memcpy(region_->slot(index_, round), request.out, request.numel * request.itemsize);
      },
      [&](uint64_t, uint64_t round) {
        const void* const* from = sources(request.out, [&](int peer) { return region_->slot(peer, round); });
        sum(request.out, request.wire, from, size_, request.wire, request.numel, false, false);
      });
}

void Communicator::all_reduce_large(const Request& request) {
  meet();
  const auto reached =
      std::count_if(theirs_.begin(), theirs_.end(), [](std::byte* buffer) { return buffer != nullptr; });
  if (in_place_ && reached == size_ - 1) return all_reduce_in_place(request);
  in_place_ = false;
  all_reduce_slots(request);
}

// Each rank sums its range of all buffers, and writes the sum into all of them.
void Communicator::all_reduce_in_place(const Request& request) {
  const size_t item = request.itemsize, most = piece_bytes / item;
  const size_t each = ceiling(ceiling(request.numel, size_), 64) * 64;  // no cache line is of two ranks
  const size_t first = std::min(each * index_, request.numel), last = std::min(first + each, request.numel);
  rounds(
      1, [](uint64_t, uint64_t) {},
      [&](uint64_t, uint64_t) {
        for (size_t begin = first; begin < last; begin += most) {
          const size_t count = std::min(most, last - begin);
          std::byte* own = request.out + begin * item;
          const void* const* from = sources(own, [&](int peer) { return theirs_[peer] + begin * item; });
          sum(own, request.wire, from, size_, request.wire, count, false, false);
          for (int peer = 0; peer < size_; ++peer) {
            if (peer != index_) std::memcpy(theirs_[peer] + begin * item, own, count * item);
          }
        }
      });
}

// Blocks of one part per rank: each rank sums its part of a block, and the parts are gathered. Scattering of block b +
// 1 comes before gathering of block b, so that a round's fill never waits for its own read:
//   round 0: scatter 0; 1: scatter 1; 2: gather 0; 3: scatter 2; 4: gather 1; ...
void Communicator::all_reduce_slots(const Request& request) {
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
          std::memcpy(region_->slot(index_, round), own.data, own.numel * item);
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
        await_all(Counter::posted, round + 1);
        if (scatters(t)) {
          const Range own = range(block, index_);
          const void* const* from = sources(own.data, [&](int peer) { return part(peer, index_, round, part_bytes); });
          sum(own.data, request.wire, from, size_, request.wire, own.numel, false, false);
          return;
        }
        for (int peer = 0; peer < size_; ++peer) {
          const Range theirs = range(block, peer);
          if (peer != index_) std::memcpy(theirs.data, region_->slot(peer, round), theirs.numel * item);
        }
      });
}

void Communicator::all_to_all(const Request& request) {
  const size_t n = request.numel * request.itemsize, chunk = part_numel(1);
  const bool streaming = n * size_ >= stream_bytes;
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        for (int peer = 0; peer < size_; ++peer) {
          const std::byte* from = request.in + peer * n + t * chunk;
          std::byte* to = peer == index_ ? request.out + peer * n + t * chunk : part(index_, peer, round, chunk);
          if (peer == index_ || !in_place_) copy(to, from, extent(t), streaming && peer == index_);
        }
      },
      [&](uint64_t t, uint64_t round) {
        for (int step = 1; step < size_; ++step) {
          const int peer = (index_ + step) % size_;
          await(Counter::posted, peer, round + 1);
          const std::byte* from =
              theirs_[peer] ? theirs_[peer] + index_ * n + t * chunk : part(peer, index_, round, chunk);
          copy(request.out + peer * n + t * chunk, from, extent(t), streaming);
        }
      });
}

void Communicator::broadcast(const Request& request) {
  const size_t n = request.numel * request.itemsize, chunk = region_->slot_bytes();
  const auto extent = [&](uint64_t t) { return std::min(chunk, n - t * chunk); };
  const bool root = request.root == index_;
  rounds(
      std::max<uint64_t>(1, ceiling(n, chunk)),
      [&](uint64_t t, uint64_t round) {
        if (root && !in_place_) std::memcpy(region_->slot(index_, round), request.out + t * chunk, extent(t));
      },
      [&](uint64_t t, uint64_t round) {
        if (root) return;
        await(Counter::posted, request.root, round + 1);
        const std::byte* theirs = theirs_[request.root];
        std::memcpy(request.out + t * chunk, theirs ? theirs + t * chunk : region_->slot(request.root, round),
                    extent(t));
      });
}

// --- in place --------------------------------------------------------------------------------------------------------

// Where the peers find what this rank brings.
Window Communicator::window(const Request& request) const {
  const bool whole = request.verb == Verb::reduce_scatter || request.verb == Verb::all_to_all;
  const size_t bytes = request.numel * request.itemsize * (whole ? size_ : 1);
  const bool brings = request.verb != Verb::barrier && (request.verb != Verb::broadcast || request.root == index_);
  if (!brings || bytes < in_place_bytes) return Window{};
  const std::byte* data =
      request.verb == Verb::all_reduce || request.verb == Verb::broadcast ? request.out : request.in;
  if (threads_) return Window{Window::address, 0, 0, 0, reinterpret_cast<uintptr_t>(data)};
  return Arena::find(data, bytes);
}

void Communicator::open_windows() {
  reaches_ = false;
  for (int peer = 0; peer < size_; ++peer) {
    const Window theirs = region_->post(peer).windows[signature_.sequence % 2];
    theirs_[peer] = nullptr;
    if (peer == index_ || theirs.place == Window::none) continue;
    reaches_ = true;
    if (theirs.place == Window::address) {
      theirs_[peer] = reinterpret_cast<std::byte*>(theirs.at);
      continue;
    }
    if (!mappings_[peer] || !mappings_[peer]->covers(theirs)) mappings_[peer] = Mapping::of(pids_[peer], theirs);
    if (!mappings_[peer]) {
      const std::string reason = std::strerror(errno), who = "rank " + std::to_string(ranks_[peer]);
      const bool dead = pulses_[peer].dead();
      fail(dead ? "dead" : "unreachable", "to map the buffers of " + who + " for " + describe(signature_),
           dead ? who + " is dead; " + whereabouts(peer) : reason,
           dead ? "Look at the last output of " + who + "." : "See whether address space is limited (ulimit -v).");
    }
    theirs_[peer] = mappings_[peer]->at(theirs.at);
  }
}

// --- waiting ---------------------------------------------------------------------------------------------------------

// A signature lives until its rank starts the next operation but one. That rank has then seen every peer start the next
// one, so every peer has compared this one.
void Communicator::sign(const Operation& operation) {
  const Request& request = operation.request;
  std::memset(&signature_, 0, sizeof signature_);  // padding too: signatures are compared as bytes
  signature_.sequence = operation.sequence;
  signature_.numel = request.numel;
  signature_.verb = static_cast<int32_t>(request.verb);
  signature_.root = request.root;
  set_text(signature_.dtype, request.dtype);
  set_text(signature_.tag, request.tag);
  Post& mine = region_->post(index_);
  std::memcpy(&mine.signatures[operation.sequence % 2], &signature_, sizeof signature_);
  const Window here = window(request);
  mine.windows[operation.sequence % 2] = here;
  in_place_ = here.place != Window::none;
  mine.started.store(operation.sequence, std::memory_order_release);
}

void Communicator::compare_signatures() {
  bool agreed = true;
  for (int peer = 0; peer < size_ && agreed; ++peer) {
    agreed = same(region_->post(peer).signatures[signature_.sequence % 2], signature_);
  }
  if (agreed) return;
  std::map<std::string, std::string> ranks_by_text;
  for (int peer : order_) {
    std::string& ranks = ranks_by_text[describe(region_->post(peer).signatures[signature_.sequence % 2])];
    ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(ranks_[peer]);
  }
  std::string got;
  for (const auto& [text, ranks] : ranks_by_text) got += (got.empty() ? "" : "; ") + ranks + ": " + text;
  fail("mismatch", "the same verb, size, dtype and tag on every rank", got,
       "Look for a branch that differs between ranks, or a model that does.");
}

std::atomic<uint64_t>& Communicator::counter_of(Counter kind, int peer) const {
  Post& theirs = region_->post(peer);
  return kind == Counter::posted ? theirs.posted : theirs.consumed;
}

void Communicator::post(uint64_t rounds) { advance(region_->post(index_).posted, rounds, Counter::posted); }
void Communicator::consume(uint64_t rounds) { advance(region_->post(index_).consumed, rounds, Counter::consumed); }

// Store, then look who sleeps; a sleeper says so, then looks at the counter: sequential consistency lets neither miss
// the other.
void Communicator::advance(std::atomic<uint64_t>& counter, uint64_t value, Counter kind) {
  counter.store(value, std::memory_order_seq_cst);
  for (int peer = 0; peer < size_; ++peer) {
    if (region_->post(peer).asleep.load(std::memory_order_seq_cst) == kind) region_->ring(peer);
  }
}

void Communicator::await_all(Counter kind, uint64_t target) {
  for (int step = 1; step < size_; ++step) await(kind, (index_ + step) % size_, target);
}

void Communicator::await(Counter kind, int peer, uint64_t target) {
  const std::atomic<uint64_t>& counter = counter_of(kind, peer);
  if (counter.load(std::memory_order_acquire) >= target) return;
  for (const auto end = Clock::now() + patience; Clock::now() < end;) {
    for (int i = 0; i < 16; ++i) pause();
    if (crowded_) sched_yield();  // to the rank that is waited for, perhaps
    if (counter.load(std::memory_order_acquire) >= target) return;
  }
  Post& mine = region_->post(index_);
  while (counter.load(std::memory_order_acquire) < target) {
    const uint32_t heard = mine.bell.load(std::memory_order_acquire);
    mine.asleep.store(kind, std::memory_order_seq_cst);
    const bool idle = counter.load(std::memory_order_seq_cst) < target && !region_->failed() && !closing_;
    if (idle) futex_wait(mine.bell, heard, slice_ms);
    mine.asleep.store(Counter::none, std::memory_order_relaxed);
    if (counter.load(std::memory_order_acquire) < target) check_trouble(kind, target, peer);
  }
}

void Communicator::check_trouble(Counter kind, uint64_t target, int awaited) {
  if (region_->failed()) throw region_->failure();
  if (closing_) {
    const std::string who = "rank " + std::to_string(ranks_[index_]);
    fail("closed", "every rank in " + describe(signature_), who + " has closed '" + name_ + "' in the midst of it",
         "Wait for every handle before closing.");
  }
  const auto behind = [&](int peer) { return counter_of(kind, peer).load(std::memory_order_acquire) < target; };
  for (int peer = 0; peer < size_; ++peer) {
    const bool closed = region_->post(peer).presence.load(std::memory_order_seq_cst) == Presence::closed;
    // What a rank did before it closed or died counts: so look at the counter once more, afterwards.
    if ((closed || pulses_[peer].dead()) && behind(peer)) {
      const std::string who = "rank " + std::to_string(ranks_[peer]);
      fail(closed ? "closed" : "dead", "every rank in " + describe(signature_),
           who + (closed ? " has closed '" + name_ + "'" : " is dead") + "; " + whereabouts(peer),
           closed ? "Let every rank run the same steps before it ends." : "Look at the last output of " + who + ".");
    }
  }
  if (interrupted_ != nullptr && (*interrupted_)()) {
    fail("interrupted", "to go on", "an interrupt of rank " + std::to_string(ranks_[index_]), "Start again.");
  }
  if (Clock::now() >= deadline_) {
    std::ostringstream limit;
    limit << timeout_s_;
    fail("timeout", "every rank in " + describe(signature_) + " within " + limit.str() + " s",
         "rank " + std::to_string(ranks_[index_]) + " waits for rank " + std::to_string(ranks_[awaited]) + "; " +
             whereabouts(-1),
         "See what the ranks that are behind do, or raise timeout_s.");
  }
}

// Where the ranks are, or where one of them is.
std::string Communicator::whereabouts(int only) const {
  std::string text;
  for (int peer : order_) {
    if (peer == index_ || (only >= 0 && peer != only)) continue;
    Post& theirs = region_->post(peer);
    const uint64_t finished = theirs.finished.load(std::memory_order_acquire);
    const uint64_t started = theirs.started.load(std::memory_order_acquire);
    text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(ranks_[peer]));
    if (started == 0) {
      text += theirs.presence.load() == Presence::absent ? " has not opened this communicator" : " has started nothing";
    } else {
      const Signature last = theirs.signatures[started % 2];
      text += (started > finished ? " is in " : " has finished ") + describe(last);
      if (started <= finished) text += " and started nothing since";
    }
  }
  return text;
}

void Communicator::fail(const std::string& kind, const std::string& expected, const std::string& got,
                        const std::string& remedy) {
  const Failure mine(kind, ranks_[index_], expected, got, remedy);
  region_->fail(mine);
  // Another rank may be writing the first failure at this moment; should it die of it, ours is as good.
  for (const auto end = Clock::now() + std::chrono::seconds(1); !region_->failed() && Clock::now() < end;) pause();
  throw region_->failed() ? region_->failure() : mine;
}

}  // namespace npuzero::comm
