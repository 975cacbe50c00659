// Buffers: the ranks' own buffers in one operation, where peers can reach them and read them in place.
//
// Each rank's own buffer decides for itself. Where a peer's cannot be reached its data comes by slots.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/arena.h"
#include "comm/peers.h"

namespace npuzero::comm {

constexpr size_t in_place_bytes = 64 << 10;  // from here on a copy costs more than waiting for all to have read

class Buffers {
 public:
  Buffers(const Group& group, Peers& peers);

  Window offer(const Request& request);  // where the peers find what this rank brings
  void open();                           // the peers' offers, once all have begun; later calls do nothing

  bool offered() const { return offered_; }
  void withdraw();                                         // this operation goes by slots all the same
  std::byte* of(int peer) const { return theirs_[peer]; }  // null where it comes by slots
  bool any() const { return reached_ > 0; }
  bool every_peers() const { return reached_ == group_.size - 1; }

 private:
  const Group& group_;
  Peers& peers_;
  std::vector<std::shared_ptr<Mapping>> mappings_;  // of the peers' arenas

  // of the operation that runs
  bool offered_ = false;            // this rank's buffer is read where it is
  std::vector<std::byte*> theirs_;  // the peers' buffers
  int reached_ = 0;                 // of them
  bool open_ = false;
};

}  // namespace npuzero::comm
