#include "comm/group.h"

#include <sched.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace npuzero::comm {
namespace {

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::vector<int> ascending(const std::vector<int>& ranks) {
  std::vector<int> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return ranks[a] < ranks[b]; });
  return order;
}

}  // namespace

Group::Group(std::shared_ptr<Region> shared, int place, std::vector<int> members, std::vector<int> processes,
             std::string called)
    : region(std::move(shared)),
      index(place),
      size(static_cast<int>(members.size())),
      ranks(std::move(members)),
      pids(std::move(processes)),
      name(std::move(called)),
      order(ascending(ranks)),
      threads(pids.empty()),
      crowded(size > cores()) {}

}  // namespace npuzero::comm
