// CRC32C (Castagnoli), the checksum of iSCSI and ext4: by the processor's instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace npuzero::io {

constexpr size_t page_bytes = 4096;

uint32_t crc32c(const void* data, size_t bytes);

// The ways to compute it that this machine has, worst to best, for tests; crc32c takes the last.
std::vector<std::string> crc32c_ways();
uint32_t crc32c_by(const std::string& way, const void* data, size_t bytes);  // Error::Contract: no such way

}  // namespace npuzero::io
