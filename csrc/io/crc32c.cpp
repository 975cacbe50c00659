#include "io/crc32c.h"

#include <array>
#include <cstring>

#include "core/check.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace npuzero::io {
namespace {

constexpr uint32_t polynomial = 0x82f63b78;  // bits reversed: the lowest is x^31
using Table = std::array<uint32_t, 256>;

// tables[k][b]: what byte b does to the remainder when k bytes follow it.
constexpr std::array<Table, 8> byte_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? polynomial : 0);
    tables[0][byte] = rest;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> tables = byte_tables();

uint64_t load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);  // little-endian, as all processors here
  return word;
}

// A way's step: the remainder after one more byte, and after 8 more.
struct ByTable {
  static uint32_t byte(uint32_t rest, uint8_t next) { return (rest >> 8) ^ tables[0][(rest ^ next) & 255]; }
  static uint32_t word(uint32_t rest, uint64_t next) {
    next ^= rest;
    uint32_t result = 0;
    for (int k = 0; k < 8; ++k) result ^= tables[7 - k][(next >> (8 * k)) & 255];
    return result;
  }
};

// An instruction takes three cycles, and a processor begins one in each: so a page is three lanes, side by side, and 16
// bytes. The lanes' remainders are put together by what the bytes of a lane do to the remainder before them.
constexpr size_t lane_bytes = 1360;
static_assert(3 * lane_bytes + 16 == page_bytes);

// What follows is fetched so far ahead: of itself a processor does not look beyond a page.
constexpr size_t prefetched_bytes = 4 * page_bytes;

// shifts[k][b]: what byte k of a remainder, of value b, becomes when a lane of zeros follows.
std::array<Table, 4> lane_tables() {
  std::array<Table, 4> shifts{};
  for (size_t k = 0; k < shifts.size(); ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t rest = byte << (8 * k);
      for (size_t i = 0; i < lane_bytes; ++i) rest = ByTable::byte(rest, 0);
      shifts[k][byte] = rest;
    }
  }
  return shifts;
}

const std::array<Table, 4> shifts = lane_tables();

inline uint32_t past_lane(uint32_t rest) {
  return shifts[0][rest & 255] ^ shifts[1][(rest >> 8) & 255] ^ shifts[2][(rest >> 16) & 255] ^ shifts[3][rest >> 24];
}

uint32_t by_table(uint32_t rest, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; bytes -= 8, data += 8) rest = ByTable::word(rest, load(data));
  for (; bytes > 0; --bytes) rest = ByTable::byte(rest, *data++);
  return rest;
}

#if defined(__x86_64__)
#define NPUZERO_CRC_NAME "sse4.2"
#define NPUZERO_CRC_TARGET __attribute__((target("sse4.2")))
#define NPUZERO_CRC_BYTE(rest, next) _mm_crc32_u8(rest, next)
#define NPUZERO_CRC_WORD(rest, next) static_cast<uint32_t>(_mm_crc32_u64(rest, next))
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
#define NPUZERO_CRC_NAME "armv8"
#define NPUZERO_CRC_TARGET __attribute__((target("+crc")))
#define NPUZERO_CRC_BYTE(rest, next) __builtin_aarch64_crc32cb(rest, next)
#define NPUZERO_CRC_WORD(rest, next) __builtin_aarch64_crc32cx(rest, next)
bool has_instruction() {
  constexpr unsigned long crc32 = 1 << 7;  // HWCAP_CRC32
  return (getauxval(AT_HWCAP) & crc32) != 0;
}
#endif

#ifdef NPUZERO_CRC_NAME
NPUZERO_CRC_TARGET uint32_t by_instruction(uint32_t rest, const uint8_t* data, size_t bytes) {
  for (; bytes >= page_bytes; bytes -= page_bytes) {
    uint32_t second = 0, third = 0;
    const uint8_t* later = data + prefetched_bytes;
    for (const uint8_t* end = data + lane_bytes; data != end; data += 8, later += 3 * 8) {
      __builtin_prefetch(later);
      rest = NPUZERO_CRC_WORD(rest, load(data));
      second = NPUZERO_CRC_WORD(second, load(data + lane_bytes));
      third = NPUZERO_CRC_WORD(third, load(data + 2 * lane_bytes));
    }
    rest = past_lane(past_lane(rest) ^ second) ^ third;
    data += 2 * lane_bytes;
    rest = NPUZERO_CRC_WORD(rest, load(data));
    rest = NPUZERO_CRC_WORD(rest, load(data + 8));
    data += 16;
  }
  for (; bytes >= 8; bytes -= 8, data += 8) rest = NPUZERO_CRC_WORD(rest, load(data));
  for (; bytes > 0; --bytes) rest = NPUZERO_CRC_BYTE(rest, *data++);
  return rest;
}
#endif

struct Way {
  const char* name;
  uint32_t (*rest)(uint32_t, const uint8_t*, size_t);
};

std::vector<Way> ways() {
  std::vector<Way> list{{"table", &by_table}};
#ifdef NPUZERO_CRC_NAME
  if (has_instruction()) list.push_back({NPUZERO_CRC_NAME, &by_instruction});
#endif
  return list;
}

uint32_t with(const Way& way, const void* data, size_t bytes) {
  return ~way.rest(~uint32_t{0}, static_cast<const uint8_t*>(data), bytes);
}

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  static const Way best = ways().back();
  return with(best, data, bytes);
}

std::vector<std::string> crc32c_ways() {
  std::vector<std::string> names;
  for (const Way& way : ways()) names.emplace_back(way.name);
  return names;
}

uint32_t crc32c_by(const std::string& name, const void* data, size_t bytes) {
  for (const Way& way : ways()) {
    if (name == way.name) return with(way, data, bytes);
  }
  throw Error(Error::Kind::Contract, "crc32c: way", "one of crc32c_ways()", name, "Name one of these.");
}

}  // namespace npuzero::io
