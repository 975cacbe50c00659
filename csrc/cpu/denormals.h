// Denormals as values like any other, whatever the caller's mode is (torch.set_flush_denormal).
#pragma once

#include <cstdint>

#include "core/numeric.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace npuzero::cpu {
inline namespace NPUZERO_ISA {

// While it lives, this thread neither flushes denormal results to zero nor reads denormals as zeros.
class WithDenormals {
 public:
  WithDenormals() : before_(get()) { set(before_ & ~flushing); }
  ~WithDenormals() { set(before_); }
  WithDenormals(const WithDenormals&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = uint32_t;
  static constexpr Mode flushing = 0x8040;  // FTZ and DAZ
  static Mode get() { return _mm_getcsr(); }
  static void set(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode flushing = 1 << 24;  // FZ
  static Mode get() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    return mode;
  }
  static void set(Mode mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
  using Mode = int;
  static constexpr Mode flushing = 0;
  static Mode get() { return 0; }
  static void set(Mode) {}
#endif

  Mode before_;
};

}  // namespace NPUZERO_ISA
}  // namespace npuzero::cpu
