#include "comm/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/check.h"

namespace npuzero::comm {
namespace {

constexpr uint64_t magic = 0x6e70757a65726f01;  // "npuzero", layout 1
constexpr char named_prefix[] = "/npuzero-";

size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

template <size_t N>
void copy_text(char (&to)[N], const std::string& from) {
  const size_t count = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), count);
  to[count] = '\0';
}

[[noreturn]] void refuse(const std::string& what, const std::string& got, const std::string& remedy) {
  throw Error(Error::Kind::Collective, "shared memory", what, got, remedy);
}

[[noreturn]] void refuse_system(const std::string& what) {
  refuse(what, std::strerror(errno), "See whether memory is left, and whether the other ranks still run.");
}

}  // namespace

Failure::Failure(std::string kind, int origin, std::string expected, std::string got, std::string remedy)
    : kind(std::move(kind)),
      origin(origin),
      expected(std::move(expected)),
      got(std::move(got)),
      remedy(std::move(remedy)) {}

Failure::Failure(const FailureText& text) : Failure(text.kind, text.origin, text.expected, text.got, text.remedy) {}

void Failure::write(FailureText& text) const {
  text.origin = origin;
  copy_text(text.kind, kind);
  copy_text(text.expected, expected);
  copy_text(text.got, got);
  copy_text(text.remedy, remedy);
}

Region::Region(int size, size_t slot_bytes) : pid_(getpid()), size_(size), slot_bytes_(slot_bytes) {}

bool Region::inherited() const { return pid_ != getpid(); }

size_t Region::bytes() const {
  return aligned(sizeof(Header)) + aligned(sizeof(Post) * size_) + slots_per_rank * slot_bytes_ * size_;
}

Post& Region::post(int index) const { return reinterpret_cast<Post*>(base_ + aligned(sizeof(Header)))[index]; }

std::byte* Region::slot(int index, uint64_t round) const {
  std::byte* first = base_ + aligned(sizeof(Header)) + aligned(sizeof(Post) * size_);
  return first + (static_cast<size_t>(index) * slots_per_rank + round % slots_per_rank) * slot_bytes_;
}

void Region::map(int fd) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) refuse_system("to map " + std::to_string(bytes()) + " bytes");
  base_ = static_cast<std::byte*>(memory);
}

// Fresh memory is zero, which is the right start of every counter.
void Region::initialise(uint64_t nonce) {
  Header& head = *new (base_) Header();
  for (int index = 0; index < size_; ++index) new (&post(index)) Post();
  head.nonce = nonce;
  head.size = static_cast<uint32_t>(size_);
  head.slot_bytes = slot_bytes_;
  head.magic = magic;
}

std::shared_ptr<Region> Region::in_threads(int size, size_t slot_bytes) {
  std::shared_ptr<Region> region(new Region(size, slot_bytes));
  region->map(-1);
  region->initialise(0);
  return region;
}

std::shared_ptr<Region> Region::create(int size, size_t slot_bytes, uint64_t nonce, bool named) {
  std::shared_ptr<Region> region(new Region(size, slot_bytes));
  if (named) {
    region->address_ = named_prefix + std::to_string(nonce);
    region->fd_ = shm_open(region->address_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  } else {
    region->fd_ = memfd_create("npuzero", MFD_CLOEXEC);
    region->address_ = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(region->fd_);
  }
  if (region->fd_ < 0) refuse_system("to create shared memory");
  if (ftruncate(region->fd_, static_cast<off_t>(region->bytes())) != 0) refuse_system("to size shared memory");
  region->map(region->fd_);
  region->initialise(nonce);
  return region;
}

std::shared_ptr<Region> Region::open(const std::string& address, int size, size_t slot_bytes, uint64_t nonce) {
  std::shared_ptr<Region> region(new Region(size, slot_bytes));
  region->address_ = address;
  const bool named = address.rfind(named_prefix, 0) == 0;
  const int fd =
      named ? shm_open(address.c_str(), O_RDWR | O_CLOEXEC, 0600) : ::open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) refuse_system("to open " + address);
  struct stat status{};
  const bool whole = fstat(fd, &status) == 0 && static_cast<size_t>(status.st_size) == region->bytes();
  if (whole) region->map(fd);
  ::close(fd);
  const bool ours = whole && region->header().magic == magic && region->header().nonce == nonce;
  if (!ours || region->header().size != static_cast<uint32_t>(size) || region->header().slot_bytes != slot_bytes) {
    refuse("the region of this communicator at " + address, "another file",
           "The rank that made it is probably dead: see its own error.");
  }
  return region;
}

Region::~Region() {
  if (base_ != nullptr) {
    const bool orphan = fd_ >= 0 && !inherited() && header().attached.load() < static_cast<uint32_t>(size_);
    if (orphan && address_.rfind(named_prefix, 0) == 0) shm_unlink(address_.c_str());
    munmap(base_, bytes());
  }
  if (fd_ >= 0) ::close(fd_);
}

void Region::arrive(int index) {
  post(index).presence.store(Presence::present);
  const bool last = header().attached.fetch_add(1) + 1 == static_cast<uint32_t>(size_);
  if (last && address_.rfind(named_prefix, 0) == 0) shm_unlink(address_.c_str());
}

void Region::leave(int index) {
  if (inherited()) return;
  post(index).presence.store(Presence::closed, std::memory_order_seq_cst);
  ring_all();
}

void Region::ring(int index) const {
  Word& bell = post(index).bell;
  bell.fetch_add(1, std::memory_order_acq_rel);
  futex_wake_all(bell);
}

void Region::ring_all() const {
  for (int index = 0; index < size_; ++index) ring(index);
}

void Region::fail(const Failure& failure) {
  if (inherited()) return;
  uint32_t none = 0;
  if (header().failed.compare_exchange_strong(none, 1)) {
    failure.write(header().failure);
    header().failed.store(2, std::memory_order_release);
  }
  ring_all();
}

}  // namespace npuzero::comm
