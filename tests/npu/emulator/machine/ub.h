// UB: its buffers, its bytes, and which of them something has computed.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/instruction.h"

namespace emulator {

constexpr uint8_t poison = 0x7b, defined = 0xff;  // a byte that nobody wrote, and the shadow of one that somebody did

enum class State { free, held, queued, out };

struct Buffer {
  Span span;
  int64_t place;  // on the device, where buffers lie end to end without red zones
  int queue;      // -1: of a TBuf
  State state;
  bool used_before = false;
};

class Ub {
 public:
  Span add_buffer(Site site, int64_t bytes, int queue);
  std::vector<Buffer>& buffers() { return buffers_; }
  int buffer_at(Site site, Span span) const;
  void inside(Site site, Span span, int64_t bytes) const;  // a fault where it is not, or where the tensor is over
  int64_t device_block(Site site, Span span) const;        // which of the device's blocks of UB a span begins in
  void check_red_zones(Site site) const;
  int64_t used() const { return used_; }

  template <class T>
  T* at(const Operand& operand) {
    return reinterpret_cast<T*>(&bytes_[operand.span.at]);
  }
  uint8_t* shadow(Span span) { return &shadow_[span.at]; }

  bool all_defined(Span span, int64_t bytes) const {
    uint8_t together = defined;
    for (int64_t i = 0; i < bytes; ++i) together &= shadow_[span.at + i];
    return together == defined;
  }

  void write(Span span, const void* from, int64_t bytes);  // which defines them
  void forget(Span span, int64_t first, int64_t bytes);    // as if nobody had written them

 private:
  std::vector<uint8_t> bytes_, shadow_;
  std::vector<Buffer> buffers_;
  int64_t used_ = 0;
};

}  // namespace emulator
