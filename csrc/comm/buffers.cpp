#include "comm/buffers.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace npuzero::comm {

Buffers::Buffers(const Group& group, Peers& peers)
    : group_(group), peers_(peers), mappings_(group.size), theirs_(group.size) {}

Window Buffers::offer(const Request& request) {
  offered_ = open_ = false;
  const bool whole = request.verb == Verb::reduce_scatter || request.verb == Verb::all_to_all;
  const size_t bytes = request.numel * request.itemsize * (whole ? group_.size : 1);
  const bool brings = request.verb != Verb::barrier && (!rooted(request.verb) || request.root == group_.index);
  if (!brings || bytes < in_place_bytes) return Window{};
  const std::byte* data = request.verb == Verb::all_reduce || rooted(request.verb) ? request.out : request.in;
  const Window here =
      group_.threads ? Window{Window::address, 0, 0, 0, reinterpret_cast<uintptr_t>(data)} : Arena::find(data, bytes);
  offered_ = here.place != Window::none;
  return here;
}

void Buffers::withdraw() {
  offered_ = false;
  reached_ = 0;
  std::fill(theirs_.begin(), theirs_.end(), nullptr);
}

void Buffers::open() {
  if (open_) return;
  open_ = true;
  reached_ = 0;
  for (int peer = 0; peer < group_.size; ++peer) {
    const Window theirs = group_.post(peer).windows[peers_.signature().sequence % 2];
    theirs_[peer] = nullptr;
    if (peer == group_.index || theirs.place == Window::none) continue;
    ++reached_;
    if (theirs.place == Window::address) {
      theirs_[peer] = reinterpret_cast<std::byte*>(theirs.at);
      continue;
    }
    if (!mappings_[peer] || !mappings_[peer]->covers(theirs)) mappings_[peer] = Mapping::of(group_.pids[peer], theirs);
    if (!mappings_[peer]) {
      const std::string reason = std::strerror(errno), who = group_.rank(peer);
      const bool dead = peers_.dead(peer);
      peers_.fail(
          dead ? "dead" : "unreachable", "to map the buffers of " + who + " for " + describe(peers_.signature()),
          dead ? who + " is dead; " + peers_.whereabouts(peer) : reason,
          dead ? "Look at the last output of " + who + "." : "See whether address space is limited (ulimit -v).");
    }
    theirs_[peer] = mappings_[peer]->at(theirs.at);
  }
}

}  // namespace npuzero::comm
