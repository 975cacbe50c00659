// How work is cut, on the host: pure functions from counts and addresses to shares and tiles.
//
// Parts lie end to end on a line. Every core gets one range of it, of nearly equal length, cut where everything written
// begins a 512-byte block (or, where the buffers' addresses disagree, a 32-byte one): so no two cores write one 32-byte
// line, whoever else's buffer ends in it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "npu/table.h"

namespace npuzero::npu {

constexpr int64_t burst_bytes = 512;  // boundaries that moves like
constexpr int64_t line_bytes = 32;    // what one core writes without disturbing another

// A buffer, and how many elements of the part each of its items is for.
struct Written {
  uint64_t address;
  int64_t itemsize, elements = 1;
};

// grain: elements that one core does together.
struct LinePart {
  int64_t count, line;
  std::array<Written, 8> written;
  int written_count;
  int64_t grain = 1;
};

// The elements first, first + step, ... of a part, at which every written buffer is on a boundary; step 0: there is
// none. Of what has an item for many elements the boundaries are of lines: `bytes` of it would be too long a way.
struct Boundaries {
  int64_t first = 0, step = 0;
};

inline Boundaries boundaries(const LinePart& part, int64_t bytes) {
  Boundaries all{0, part.grain};
  for (int w = 0; w < part.written_count; ++w) {
    const Written& written = part.written[w];
    const int64_t items = (written.elements == 1 ? bytes : line_bytes) / written.itemsize;
    const int64_t first = (items - static_cast<int64_t>(written.address / written.itemsize % items)) % items;
    const Boundaries its{first * written.elements, items * written.elements};
    const Boundaries &fine = its.step < all.step ? its : all, &coarse = its.step < all.step ? all : its;
    if (coarse.first % fine.step != fine.first) return {};
    all = coarse;
  }
  return all;
}

// Elements before the first 512-byte boundary, for a tile to end at one; 0 where there is none.
inline int32_t lead(const LinePart& part) { return static_cast<int32_t>(boundaries(part, burst_bytes).first); }

// Of the widest dtype that a turn moves, kSlotBytes.
inline int32_t tile_of(int64_t widest_itemsize) { return static_cast<int32_t>(kSlotBytes / widest_itemsize); }

// The bytes of UB that an update (flat.h) has for a tile: two slots of places and scratch, 4 bytes an element each, and
// what lies between them; two masks and a divisor; draws.h's columns and masks; codes.h's lanes, what is spread of
// them, masks.
inline int64_t flat_bytes(int64_t tile, int moments, int rooms, bool drawn, bool coded) {
  const int64_t places = 2 * (2 + moments) + rooms, blocks = (tile / kCodeBlock + 7) / 8 * 8;
  return 4 * tile * places + 5 * (burst_bytes / 2) + 2 * (tile / 8) + line_bytes +
         (drawn ? 2 * 4 * kDrawTable + 2 * line_bytes : 0) +
         (coded ? blocks * (3 * 4 + 2 * line_bytes) + 2 * line_bytes : 0);
}

// The elements of a tile of an update: what fits, not above what moves kSlotBytes.
inline int32_t flat_tile(int moments, int rooms, bool drawn, bool coded) {
  constexpr int64_t usable = 188160;
  int32_t tile = kSlotBytes / 4;
  while (flat_bytes(tile, moments, rooms, drawn, coded) > usable) tile -= kGrain;
  return tile;
}

// Ranges of the line in which no cut may lie, both ends included, sorted and apart: a buffer's end shares its 32-byte
// line with another's start there.
inline std::vector<std::pair<int64_t, int64_t>> bound_together(const std::vector<LinePart>& parts) {
  struct Span {
    uint64_t begin, end;
    const LinePart* part;
  };
  std::vector<Span> spans;
  for (const LinePart& part : parts) {
    for (int w = 0; w < part.written_count && part.count; ++w) {
      const auto& [address, itemsize, elements] = part.written[w];
      spans.push_back({address, address + (part.count + elements - 1) / elements * itemsize, &part});
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<std::pair<int64_t, int64_t>> found;
  for (size_t i = 1; i < spans.size(); ++i) {
    const Span &below = spans[i - 1], &above = spans[i];
    if ((below.end - 1) / line_bytes != above.begin / line_bytes) continue;
    const int64_t last = below.part->line + below.part->count, first = above.part->line;
    // The end of one part and the start of another are done by one core; where they lie the other way round on the
    // line, with everything between.
    found.emplace_back(last <= first ? std::pair{last, first} : std::pair{first + 1, last - 1});
  }
  std::sort(found.begin(), found.end());
  std::vector<std::pair<int64_t, int64_t>> joined;
  for (const auto& range : found) {
    if (!joined.empty() && range.first <= joined.back().second) {
      joined.back().second = std::max(joined.back().second, range.second);
    } else if (range.first <= range.second) {
      joined.push_back(range);
    }
  }
  return joined;
}

// One share for each of at most `cores` cores, none of them with less than a tile unless there is less.
inline std::vector<Share> cut(const std::vector<LinePart>& parts, int64_t total, int cores, int64_t tile) {
  const std::vector<std::pair<int64_t, int64_t>> bound = bound_together(parts);
  const auto part_at = [&](int64_t place) {
    const auto after = std::upper_bound(parts.begin(), parts.end(), place,
                                        [](int64_t at, const LinePart& part) { return at < part.line; });
    return static_cast<int64_t>(after - parts.begin()) - 1;
  };
  // The last place where a cut may be, in (least, place]; least where there is none.
  const auto last_cut = [&](int64_t least, int64_t place) {
    while (place > least) {
      const auto after = std::upper_bound(bound.begin(), bound.end(), place,
                                          [](int64_t at, const auto& range) { return at < range.first; });
      if (after != bound.begin() && place <= std::prev(after)->second) {
        place = std::prev(after)->first - 1;
        continue;
      }
      const LinePart& part = parts[part_at(place)];
      if (place == part.line) return place;
      Boundaries at = boundaries(part, burst_bytes);
      if (!at.step) at = boundaries(part, line_bytes);
      const int64_t inside = place - part.line;
      const int64_t aligned = at.step && inside >= at.first ? inside - (inside - at.first) % at.step : 0;
      if (aligned == inside) return place;
      place = part.line + aligned;
    }
    return least;
  };
  const int64_t wanted = std::min<int64_t>(cores, std::max<int64_t>(1, (total + tile - 1) / tile));
  std::vector<Share> shares;
  int64_t begin = 0;
  for (int64_t core = 1; core <= wanted; ++core) {
    const int64_t goal = total / wanted * core + total % wanted * core / wanted;
    const int64_t end = core == wanted ? total : last_cut(begin, goal);
    if (end > begin) shares.push_back({begin, end, part_at(begin)});
    begin = end;
  }
  return shares;
}

// norm's shares: whole blocks, of elements enough that the contract's workspace has kNormBytes for every core; one core
// where nothing is to be done, since somebody has to say so.
inline std::vector<Share> cut_norm(int64_t count, int cores) {
  constexpr int64_t least = kNormBytes / 16 * 8192;  // ops/norm.h has 16 bytes for each 4096 elements
  const int64_t blocks = (count + kNormBlock - 1) / kNormBlock;
  const int64_t wanted = std::min<int64_t>(cores, std::max<int64_t>(1, count / least));
  std::vector<Share> shares;
  for (int64_t core = 0; core < wanted; ++core) {
    const auto edge = [&](int64_t i) {
      return std::min(count, (blocks / wanted * i + blocks % wanted * i / wanted) * kNormBlock);
    };
    shares.push_back({edge(core), edge(core + 1), 0});
  }
  return shares;
}

}  // namespace npuzero::npu
