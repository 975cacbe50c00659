// Verbs: the collectives, each as a sequence of rounds.
//
// In round t each rank fills its own slot t % 2 ("posted"), then reads the slots of the others ("consumed"); it fills
// round t + 1 before it reads round t, so copying in and copying out overlap between ranks. A slot is filled again once
// all peers have consumed its last round. In the first round of an operation all ranks wait for all, and compare what
// each said it would do (its Signature), before anything is read.
//
// In place: a rank whose buffer its peers can reach (Window: it is in the process's Arena, or the ranks are threads)
// says where it is beside its signature, posts all rounds at once and fills no slot; the others read the buffer itself.
// The operation ends on that rank once all peers have consumed. An all_reduce goes in place where all buffers can: each
// rank then sums its range of all of them into all of them.
//
// Invariants:
//   - round_ is equal on all ranks between operations, since operations of equal signature take equally many rounds
//   - sums run in ascending order of the global ranks, whatever the order of the group
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/buffers.h"
#include "comm/peers.h"

namespace npuzero::comm {

class Verbs {
 public:
  Verbs(const Group& group, Peers& peers);

  void run(const Request& request, uint64_t sequence);

 private:
  void all_gather(const Request& request);
  void reduce_scatter(const Request& request);
  void all_reduce(const Request& request);
  void all_reduce_small(const Request& request);
  void all_reduce_slots(const Request& request);
  void all_reduce_in_place(const Request& request);
  void all_to_all(const Request& request);
  void broadcast(const Request& request);
  template <class Fill, class Read>
  void rounds(uint64_t count, Fill fill, Read read);
  void meet();  // a round that carries nothing

  std::byte* slot(int writer, uint64_t round) const { return group_.region->slot(writer, round); }
  // The part of writer's slot that is meant for reader, where a slot holds one part per peer.
  std::byte* part(int writer, int reader, uint64_t round, size_t part_bytes) const;
  size_t part_numel(size_t itemsize) const;
  // In order of the global ranks: `own` at this rank, and what peer p meant for this rank elsewhere.
  template <class Theirs>
  const void* const* sources(const void* own, Theirs theirs);

  const Group& group_;
  Peers& peers_;
  Buffers buffers_;
  const int index_, size_;
  uint64_t round_ = 0;
  std::vector<const void*> sources_;
};

}  // namespace npuzero::comm
