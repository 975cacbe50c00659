#include "io/file.h"

#include <fcntl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "io/crc32c.h"
#include "io/system.h"

namespace npuzero::io {
namespace {

[[noreturn]] void refuse(const std::string& folder) { throw std::system_error(errno, std::generic_category(), folder); }

// Calls again as long as a signal comes between.
template <class Do>
auto past_signals(const Do& call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

// With a name for an instant, where the file system knows no others (NFS, overlays of old kernels).
int open_unlinked(const std::string& folder) {
  std::string path = folder + "/.npuzero-XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC);  // 0600
  if (file >= 0) ::unlink(path.c_str());
  return file;
}

int open_file(const std::string& folder) {
  const int file = past_signals([&] { return open_nameless(folder); });
  const bool unknown = file < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL);
  return unknown ? past_signals([&] { return open_unlinked(folder); }) : file;
}

// Moves all bytes by `move(done)`, which moves some from the `done`th on.
template <class Move>
std::optional<Failure> move_all(size_t bytes, int64_t offset, const Move& move) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = past_signals([&] { return move(done); });
    const int64_t at = offset + static_cast<int64_t>(done);
    if (moved < 0) return Failure{Failure::Kind::failed, errno, at};
    if (moved == 0) return Failure{Failure::Kind::ended, 0, at};
    done += static_cast<size_t>(moved);
  }
  return std::nullopt;
}

uint32_t zeros_sum() {
  static const std::byte zeros[page_bytes] = {};
  return crc32c(zeros, page_bytes);
}

}  // namespace

File::File(const std::string& folder, int64_t bytes, bool verify) : file_(open_file(folder)) {
  if (file_ < 0) refuse(folder);
  if (bytes > 0 && past_signals([&] { return allocate(file_, bytes); }) != 0) {
    const int error = errno;
    ::close(file_);
    errno = error;
    refuse(folder);
  }
  if (verify) sums_.assign(static_cast<size_t>(bytes) / page_bytes, zeros_sum());
  if (bytes > 0) try_direct();
}

File::~File() { ::close(file_); }

// Some file systems take the flag, and refuse the first transfer.
void File::try_direct() {
  if (make_direct(file_) != 0) return;
  alignas(page_bytes) std::byte page[page_bytes];
  direct_ = past_signals([&] { return ::pread(file_, page, page_bytes, 0); }) == ssize_t{page_bytes};
  if (!direct_) ::fcntl(file_, F_SETFL, ::fcntl(file_, F_GETFL) & ~O_DIRECT);
}

std::optional<Failure> File::read(std::byte* data, size_t bytes, int64_t offset) const {
  const auto move = [&](size_t done) { return read_at(file_, data + done, bytes - done, offset + int64_t(done)); };
  if (const auto failure = move_all(bytes, offset, move)) return failure;
  if (sums_.empty()) return std::nullopt;
  const size_t first = static_cast<size_t>(offset) / page_bytes;
  for (size_t page = 0; page < bytes / page_bytes; ++page) {
    if (crc32c(data + page * page_bytes, page_bytes) != sums_[first + page]) {
      return Failure{Failure::Kind::damaged, 0, offset + int64_t(page * page_bytes)};
    }
  }
  return std::nullopt;
}

std::optional<Failure> File::write(const std::byte* data, size_t bytes, int64_t offset) {
  const size_t first = static_cast<size_t>(offset) / page_bytes;
  if (!sums_.empty()) {
    for (size_t page = 0; page < bytes / page_bytes; ++page) {
      sums_[first + page] = crc32c(data + page * page_bytes, page_bytes);
    }
  }
  return move_all(bytes, offset,
                  [&](size_t done) { return write_at(file_, data + done, bytes - done, offset + int64_t(done)); });
}

bool is_memory(const std::string& folder) {
  constexpr uint32_t tmpfs = 0x01021994, ramfs = 0x858458f6;
  struct statfs system{};
  if (past_signals([&] { return ::statfs(folder.c_str(), &system); }) != 0) refuse(folder);
  const auto kind = static_cast<uint32_t>(system.f_type);
  return kind == tmpfs || kind == ramfs;
}

}  // namespace npuzero::io
