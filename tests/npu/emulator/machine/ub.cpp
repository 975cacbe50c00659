#include "machine/ub.h"

#include <algorithm>
#include <cstring>

namespace emulator {
namespace {

constexpr int64_t capacity = 188160;
constexpr int64_t red_zone = 64;  // bytes before and after each buffer that nothing may touch
constexpr int most_buffers = 64;
constexpr uint8_t zone = 0xa5;

}  // namespace

Span Ub::add_buffer(Site site, int64_t bytes, int queue) {
  if (bytes <= 0) refuse(site, "capacity", "a buffer of no bytes");
  const int64_t size = (bytes + block - 1) / block * block, place = used_;
  used_ += size;
  if (used_ > capacity) refuse(site, "capacity", "more than 188160 bytes of UB");
  if (buffers_.size() == most_buffers) refuse(site, "queue", "more than 64 buffers");
  const int64_t start = static_cast<int64_t>(bytes_.size()) + red_zone;
  bytes_.resize(start, zone);
  bytes_.resize(start + size, poison);
  bytes_.resize(start + size + red_zone, zone);
  shadow_.resize(bytes_.size(), 0);
  const Span span{static_cast<int32_t>(start), static_cast<int32_t>(size)};
  buffers_.push_back({span, place, queue, queue < 0 ? State::out : State::free});
  return span;
}

int Ub::buffer_at(Site site, Span span) const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (span.at >= buffers_[i].span.at && span.at < buffers_[i].span.at + buffers_[i].span.bytes) {
      return static_cast<int>(i);
    }
  }
  refuse(site, "bounds", "an address outside every buffer");
}

void Ub::inside(Site site, Span span, int64_t bytes) const {
  if (span.bytes < bytes) refuse(site, "bounds", "beyond the end of a buffer in UB");
  if (buffers_[buffer_at(site, span)].state == State::free) refuse(site, "queue", "use of a tensor after its end");
}

int64_t Ub::device_block(Site site, Span span) const {
  const Buffer& buffer = buffers_[buffer_at(site, span)];
  return (buffer.place + span.at - buffer.span.at) / block;
}

void Ub::check_red_zones(Site site) const {
  std::vector<bool> owned(bytes_.size(), false);
  for (const Buffer& buffer : buffers_) {
    std::fill_n(owned.begin() + buffer.span.at, buffer.span.bytes, true);
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!owned[i] && bytes_[i] != zone) refuse(site, "bounds", "a red zone was written");
  }
}

void Ub::write(Span span, const void* from, int64_t bytes) {
  std::memcpy(&bytes_[span.at], from, bytes);
  std::fill_n(&shadow_[span.at], bytes, defined);
}

void Ub::forget(Span span, int64_t first, int64_t bytes) {
  std::fill_n(bytes_.begin() + span.at + first, bytes, poison);
  std::fill_n(shadow_.begin() + span.at + first, bytes, uint8_t{0});
}

}  // namespace emulator
