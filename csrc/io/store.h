// Store: bytes in one nameless file of each of several folders, in stripes that go round among them. Each folder has a
// queue and threads of its own, so that a slow disk holds none of the others up; a request is cut into pieces, which
// the threads serve side by side.
//
// Invariants:
//   - a request is done when no thread touches its memory any more, whether it went well or not
//   - close() (and the destructor) returns when every request is done and every thread has ended
//   - in a process forked from the store's own, which has none of its threads, nothing is waited for
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "io/file.h"

namespace npuzero::io {

constexpr int64_t stripe_bytes = 2 << 20;  // of a folder until the next one's turn comes; and a piece at the most

enum class Verb { read, write };

struct Trouble {
  Failure failure;
  size_t folder;
};

// One read or write under way.
class Request {
 public:
  explicit Request(size_t pieces) : left_(pieces) {}

  bool done() const;
  // Until it is done, or `interrupted()`, which is asked now and then, says so. Returns whether it is done.
  bool wait(const std::function<bool()>& interrupted) const;
  std::optional<Trouble> trouble() const;  // the first that a piece met

  void piece_done(const std::optional<Trouble>& trouble);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  size_t left_;
  std::optional<Trouble> trouble_;
};

class Store {
 public:
  // std::system_error, about a folder or for want of threads. `threads` for each folder.
  Store(const std::vector<std::string>& folders, int64_t bytes, int threads, bool verify);
  Store(const Store&) = delete;
  ~Store();

  int64_t bytes() const { return bytes_; }
  bool direct() const { return direct_; }  // in all folders
  // Whole pages at a page's offset; null once it is closed. The memory must stay until the request is done.
  std::shared_ptr<Request> submit(Verb verb, int64_t offset, std::byte* data, size_t bytes);
  void close();
  bool inherited() const;  // from a parent process

  // The part of so many bytes that lies in one of the folders.
  static int64_t share(int64_t bytes, size_t folders, size_t folder);

 private:
  struct Piece {
    std::shared_ptr<Request> request;
    Verb verb;
    int64_t offset;  // in the folder's file
    std::byte* data;
    size_t bytes;
  };

  struct Disk {
    Disk(const std::string& folder, int64_t bytes, bool verify) : file(folder, bytes, verify) {}

    File file;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Piece> pieces;
    bool closing = false;
    std::vector<std::thread> threads;
  };

  void start(int threads);
  static void serve(Disk& disk, size_t folder);

  const int64_t bytes_;
  const pid_t process_;
  std::vector<std::unique_ptr<Disk>> disks_;
  bool direct_ = true;
  std::mutex mutex_;  // of `closed_`, and of who closes
  bool closed_ = false;
};

struct InItsOwnProcess {
  void operator()(Store* store) const {
    if (!store->inherited()) delete store;
  }
};

}  // namespace npuzero::io
