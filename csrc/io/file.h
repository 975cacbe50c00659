// A file without a name in a folder: whatever ends the process, nothing of it is left. Its bytes are on the disk from
// the start, so that no write runs out of them, and go past the page cache where the file system lets them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace npuzero::io {

struct Failure {
  enum class Kind { failed, ended, damaged };

  Kind kind;
  int error;       // of the system, where a call has failed
  int64_t offset;  // in the file
};

class File {
 public:
  // Of so many zeros. With `verify` it keeps the checksum of each page that is written, and compares what is read.
  // std::system_error where the system refuses.
  File(const std::string& folder, int64_t bytes, bool verify);
  File(const File&) = delete;
  ~File();

  bool direct() const { return direct_; }

  // All of the bytes, which are whole pages at a page's offset: signals and short transfers are none of the caller's
  // business. Any thread may; who reads and writes the same pages does so one after another.
  std::optional<Failure> read(std::byte* data, size_t bytes, int64_t offset) const;
  std::optional<Failure> write(const std::byte* data, size_t bytes, int64_t offset);

 private:
  void try_direct();

  int file_ = -1;
  bool direct_ = false;
  std::vector<uint32_t> sums_;  // of each page; empty without `verify`
};

// Whether files in the folder are memory themselves (tmpfs, ramfs). std::system_error where the folder is not there.
bool is_memory(const std::string& folder);

}  // namespace npuzero::io
