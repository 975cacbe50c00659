// Checksums of what comes through the pipe, of its first bytes as many as each argument says, by every way there is here:
// a line for each with the way's name, the number of bytes and the checksum.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "io/crc32c.h"

int main(int count, char** arguments) {
  std::vector<char> data;
  for (int byte; (byte = std::getchar()) != EOF;) data.push_back(static_cast<char>(byte));
  for (const std::string& way : npuzero::io::crc32c_ways()) {
    for (int i = 1; i < count; ++i) {
      const auto bytes = static_cast<size_t>(std::atoll(arguments[i]));
      if (bytes > data.size()) return 2;
      std::printf("%s %zu %u\n", way.c_str(), bytes, npuzero::io::crc32c_by(way, data.data(), bytes));
    }
  }
}
