#include "comm/peers.h"

#include <sched.h>

#include <cstring>
#include <map>
#include <sstream>

namespace npuzero::comm {
namespace {

constexpr auto patience = std::chrono::microseconds(50);  // of looking again before sleeping

}  // namespace

Peers::Peers(const Group& group, double timeout_s) : group_(group), timeout_s_(timeout_s) {
  for (int peer = 0; peer < group_.size; ++peer) {
    pulses_.emplace_back(group_.threads || peer == group_.index ? 0 : group_.pids[peer]);
  }
}

// --- an operation ----------------------------------------------------------------------------------------------------

// A signature lives until its rank starts the next operation but one. That rank has then seen every peer start the next
// one, so every peer has compared this one.
void Peers::begin(const Request& request, uint64_t sequence, const Window& window) {
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  Post& mine = group_.mine();
  mine.inside.store(1, std::memory_order_seq_cst);
  if (group_.region->failed()) throw group_.region->failure();
  signature_ = signature_of(request, sequence);
  std::memcpy(&mine.signatures[sequence % 2], &signature_, sizeof signature_);
  mine.windows[sequence % 2] = window;
  mine.started.store(sequence, std::memory_order_release);
}

void Peers::compare_signatures() {
  const auto theirs = [&](int peer) -> const Signature& {
    return group_.post(peer).signatures[signature_.sequence % 2];
  };
  bool agreed = true;
  for (int peer = 0; peer < group_.size && agreed; ++peer) agreed = same(theirs(peer), signature_);
  if (agreed) return;
  std::map<std::string, std::string> ranks_by_text;
  for (int peer : group_.order) {
    std::string& ranks = ranks_by_text[describe(theirs(peer))];
    ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(group_.ranks[peer]);
  }
  std::string got;
  for (const auto& [text, ranks] : ranks_by_text) got += (got.empty() ? "" : "; ") + ranks + ": " + text;
  fail("mismatch", "the same collective, size, dtype and tag on every rank", got,
       "Look for a branch that differs between ranks, or a model that does.");
}

void Peers::finish() {
  Post& mine = group_.mine();
  mine.finished.store(signature_.sequence, std::memory_order_release);
  mine.inside.store(0, std::memory_order_release);
}

// After a failure a caller may free its buffer. Peers that are threads may still be at work on it: none begins once the
// failure is known, and those that did are waited for. (What processes share stays mapped: see Arena.)
void Peers::abandon() {
  group_.mine().inside.store(0, std::memory_order_seq_cst);
  if (!group_.threads) return;
  for (int peer = 0; peer < group_.size; ++peer) {
    while (group_.post(peer).inside.load(std::memory_order_seq_cst) != 0) sched_yield();
  }
}

// --- counters --------------------------------------------------------------------------------------------------------

std::atomic<uint64_t>& Peers::counter_of(Counter kind, int peer) const {
  Post& theirs = group_.post(peer);
  return kind == Counter::posted ? theirs.posted : theirs.consumed;
}

void Peers::post(uint64_t rounds) { advance(group_.mine().posted, rounds, Counter::posted); }
void Peers::consume(uint64_t rounds) { advance(group_.mine().consumed, rounds, Counter::consumed); }

// Store, then look who sleeps; a sleeper says so, then looks at the counter: sequential consistency lets neither miss
// the other.
void Peers::advance(std::atomic<uint64_t>& counter, uint64_t value, Counter kind) {
  counter.store(value, std::memory_order_seq_cst);
  for (int peer = 0; peer < group_.size; ++peer) {
    if (group_.post(peer).asleep.load(std::memory_order_seq_cst) == kind) group_.region->ring(peer);
  }
}

void Peers::await_all(Counter kind, uint64_t target) {
  for (int step = 1; step < group_.size; ++step) await(kind, (group_.index + step) % group_.size, target);
}

// Looking again is quicker than sleeping, but takes a core. Where a thread waits for the operation, or runs it, that core
// has nothing better to do. Else the progress thread runs it beside compute, which wants the core: a peer that is in the
// operation too is a chunk away, one that is not may be a layer away, and is slept for.
bool Peers::worth_looking(int peer) const {
  if (waiters.load(std::memory_order_relaxed) != 0) return true;
  return group_.post(peer).started.load(std::memory_order_acquire) >= signature_.sequence;
}

void Peers::await(Counter kind, int peer, uint64_t target) {
  const std::atomic<uint64_t>& counter = counter_of(kind, peer);
  if (counter.load(std::memory_order_acquire) >= target) return;
  if (worth_looking(peer)) {
    looks.fetch_add(1, std::memory_order_relaxed);
    for (const auto end = Clock::now() + patience; Clock::now() < end;) {
      for (int i = 0; i < 16; ++i) pause();  // a pause takes 10 to 150 cycles: so the clock says when it is enough
      if (group_.crowded) sched_yield();     // to the rank that is waited for, perhaps
      if (counter.load(std::memory_order_acquire) >= target) return;
    }
  }
  Post& mine = group_.mine();
  while (counter.load(std::memory_order_acquire) < target) {
    // The bell is read before the counter: one that is rung in between has another value by then, and nobody sleeps.
    const uint32_t heard = mine.bell.load(std::memory_order_acquire);
    mine.asleep.store(kind, std::memory_order_seq_cst);
    const bool idle = counter.load(std::memory_order_seq_cst) < target && !group_.region->failed() && !closing;
    if (idle) futex_wait(mine.bell, heard, slice_ms);
    mine.asleep.store(Counter::none, std::memory_order_relaxed);
    if (counter.load(std::memory_order_acquire) < target) check_trouble(kind, target, peer);
  }
}

// --- trouble ---------------------------------------------------------------------------------------------------------

void Peers::check_trouble(Counter kind, uint64_t target, int awaited) {
  if (group_.region->failed()) throw group_.region->failure();
  if (closing) {
    fail("closed", "every rank in " + describe(signature_),
         group_.rank(group_.index) + " has closed '" + group_.name + "' in the midst of it",
         "Wait for every handle before closing.");
  }
  const auto behind = [&](int peer) { return counter_of(kind, peer).load(std::memory_order_acquire) < target; };
  for (int peer = 0; peer < group_.size; ++peer) {
    const bool closed = group_.post(peer).presence.load(std::memory_order_seq_cst) == Presence::closed;
    // What a rank did before it closed or died counts: so look at the counter once more, afterwards.
    if ((closed || dead(peer)) && behind(peer)) {
      const std::string who = group_.rank(peer);
      fail(closed ? "closed" : "dead", "every rank in " + describe(signature_),
           who + (closed ? " has closed '" + group_.name + "'" : " is dead") + "; " + whereabouts(peer),
           closed ? "Let every rank run the same steps before it ends." : "Look at the last output of " + who + ".");
    }
  }
  if (interrupted != nullptr && (*interrupted)()) {
    fail("interrupted", "to go on", "an interrupt of " + group_.rank(group_.index), "Start again.");
  }
  if (Clock::now() >= deadline_) {
    std::ostringstream limit;
    limit << timeout_s_;
    fail("timeout", "every rank in " + describe(signature_) + " within " + limit.str() + " s",
         group_.rank(group_.index) + " waits for " + group_.rank(awaited) + "; " + whereabouts(-1),
         "See what the ranks that are behind do, or raise timeout_s.");
  }
}

// Where the ranks are, or where one of them is.
std::string Peers::whereabouts(int only) const {
  std::string text;
  for (int peer : group_.order) {
    if (peer == group_.index || (only >= 0 && peer != only)) continue;
    Post& theirs = group_.post(peer);
    const uint64_t finished = theirs.finished.load(std::memory_order_acquire);
    const uint64_t started = theirs.started.load(std::memory_order_acquire);
    text += (text.empty() ? "" : "; ") + group_.rank(peer);
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

void Peers::fail(const std::string& kind, const std::string& expected, const std::string& got,
                 const std::string& remedy) {
  const Failure mine(kind, group_.ranks[group_.index], expected, got, remedy);
  group_.region->fail(mine);
  // Another rank may be writing the first failure at this moment; should it die of it, ours is as good.
  for (const auto end = Clock::now() + std::chrono::seconds(1); !group_.region->failed() && Clock::now() < end;) {
    pause();
  }
  throw group_.region->failed() ? group_.region->failure() : mine;
}

}  // namespace npuzero::comm
