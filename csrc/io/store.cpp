#include "io/store.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace npuzero::io {
namespace {

constexpr std::chrono::milliseconds between_looks{100};

// The threads of a store leave signals to the others: threads begin with what is blocked where they are made.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  NoSignals(const NoSignals&) = delete;
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

bool Request::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_ == 0;
}

bool Request::wait(const std::function<bool()>& interrupted) const {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, between_looks, [this] { return left_ == 0; })) {
    lock.unlock();
    if (interrupted()) return false;
    lock.lock();
  }
  return true;
}

std::optional<Trouble> Request::trouble() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return trouble_;
}

void Request::piece_done(const std::optional<Trouble>& trouble) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!trouble_) trouble_ = trouble;
  if (--left_ == 0) changed_.notify_all();
}

Store::Store(const std::vector<std::string>& folders, int64_t bytes, int threads, bool verify)
    : bytes_(bytes), process_(::getpid()) {
  for (size_t i = 0; i < folders.size(); ++i) {
    disks_.push_back(std::make_unique<Disk>(folders[i], share(bytes, folders.size(), i), verify));
    direct_ = direct_ && disks_.back()->file.direct();
  }
  try {
    start(threads);
  } catch (...) {
    close();
    throw;
  }
}

Store::~Store() { close(); }

void Store::start(int threads) {
  const NoSignals none;
  for (size_t i = 0; i < disks_.size(); ++i) {
    for (int k = 0; k < threads; ++k) disks_[i]->threads.emplace_back(&Store::serve, std::ref(*disks_[i]), i);
  }
}

bool Store::inherited() const { return ::getpid() != process_; }

int64_t Store::share(int64_t bytes, size_t folders, size_t folder) {
  const auto count = static_cast<int64_t>(folders), own = static_cast<int64_t>(folder);
  const int64_t stripes = bytes / stripe_bytes, rest = bytes % stripe_bytes;
  return (stripes / count + (own < stripes % count)) * stripe_bytes + (own == stripes % count ? rest : 0);
}

std::shared_ptr<Request> Store::submit(Verb verb, int64_t offset, std::byte* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || inherited()) return nullptr;
  const auto count = static_cast<int64_t>(disks_.size()), end = offset + static_cast<int64_t>(bytes);
  const int64_t pieces = bytes == 0 ? 0 : (end - 1) / stripe_bytes - offset / stripe_bytes + 1;
  auto request = std::make_shared<Request>(static_cast<size_t>(pieces));
  while (offset < end) {
    const int64_t stripe = offset / stripe_bytes, within = offset % stripe_bytes;
    const int64_t length = std::min(stripe_bytes - within, end - offset);
    Disk& disk = *disks_[static_cast<size_t>(stripe % count)];
    {
      const std::lock_guard<std::mutex> of_disk(disk.mutex);
      disk.pieces.push_back({request, verb, stripe / count * stripe_bytes + within, data, static_cast<size_t>(length)});
    }
    disk.changed.notify_one();
    offset += length;
    data += length;
  }
  return request;
}

void Store::close() {
  if (inherited()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (const auto& disk : disks_) {
    const std::lock_guard<std::mutex> of_disk(disk->mutex);
    disk->closing = true;
    disk->changed.notify_all();
  }
  for (const auto& disk : disks_) {
    for (std::thread& thread : disk->threads) thread.join();
    disk->threads.clear();
  }
  disks_.clear();
}

void Store::serve(Disk& disk, size_t folder) {
  for (;;) {
    Piece piece;
    {
      std::unique_lock<std::mutex> lock(disk.mutex);
      disk.changed.wait(lock, [&disk] { return disk.closing || !disk.pieces.empty(); });
      if (disk.pieces.empty()) return;
      piece = std::move(disk.pieces.front());
      disk.pieces.pop_front();
    }
    std::optional<Trouble> trouble = piece.request->trouble();
    if (!trouble) {  // of a request that has failed nothing more is moved
      const auto failure = piece.verb == Verb::read ? disk.file.read(piece.data, piece.bytes, piece.offset)
                                                    : disk.file.write(piece.data, piece.bytes, piece.offset);
      if (failure) trouble = Trouble{*failure, folder};
    }
    piece.request->piece_done(trouble);
  }
}

}  // namespace npuzero::io
