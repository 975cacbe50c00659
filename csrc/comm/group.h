// Group: the ranks of one communicator, as one of them sees them.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/region.h"

namespace npuzero::comm {

struct Group {
  // ranks: global ranks in group order. pids: of the processes, in group order; empty where ranks are threads.
  Group(std::shared_ptr<Region> region, int index, std::vector<int> ranks, std::vector<int> pids, std::string name);

  const std::shared_ptr<Region> region;
  const int index, size;
  const std::vector<int> ranks;
  const std::vector<int> pids;
  const std::string name;
  const std::vector<int> order;  // positions in the group, by ascending global rank
  const bool threads;
  const bool crowded;  // more ranks than cores

  Post& mine() const { return region->post(index); }
  Post& post(int peer) const { return region->post(peer); }
  std::string rank(int peer) const { return "rank " + std::to_string(ranks[peer]); }
};

}  // namespace npuzero::comm
