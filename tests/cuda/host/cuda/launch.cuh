// In place of csrc/cuda/launch.cuh: the cuda kernels, unchanged, compiled for the processor. Each block's threads are
// fibers on one thread of the system, run in turn; where they meet (a shuffle) each waits until all have come. So index
// arithmetic, tails, alignment cases and every rounding are tested without a GPU; speed, memory ordering and what nvcc
// makes of the source are not.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "core/view.h"

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

struct uint2 {
  uint32_t x, y;
} __attribute__((may_alias));
struct uint4 {
  uint32_t x, y, z, w;
} __attribute__((may_alias));

namespace npuzero::cuda {

constexpr int64_t parameter_bytes = 32764;

struct Dimension {
  unsigned x;
};
inline Dimension threadIdx, blockIdx, blockDim, gridDim;

// The fibers of one block.
class Block {
 public:
  // Runs body once per thread.
  static void run(unsigned threads, const std::function<void()>& body) {
    Block block(threads, body);
    current_ = &block;
    while (block.left_ > 0) {
      for (block.now_ = 0; block.now_ < threads; ++block.now_) {
        Fiber& fiber = block.fibers_[block.now_];
        threadIdx.x = block.now_;
        if (!fiber.done) swapcontext(&block.outside_, &fiber.context);
      }
    }
  }

  // Waits for the other threads of the block; they must all come here.
  static void meet() { swapcontext(&current_->fibers_[current_->now_].context, &current_->outside_); }

  // What each thread shows the others between two meetings.
  static double& shown(unsigned thread) { return current_->shown_[thread]; }

 private:
  static constexpr size_t stack_bytes = 256 << 10;
  struct Fiber {
    ucontext_t context;
    bool done = false;
  };

  Block(unsigned threads, const std::function<void()>& body)
      : body_(body), fibers_(threads), shown_(threads), left_(threads) {
    while (stacks_.size() < threads) stacks_.emplace_back(new char[stack_bytes]);
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = fibers_[i];
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks_[i].get();
      fiber.context.uc_stack.ss_size = stack_bytes;
      fiber.context.uc_link = &outside_;
      makecontext(&fiber.context, &Block::begin, 0);
    }
  }

  static void begin() {
    Block& block = *current_;
    block.body_();
    block.fibers_[block.now_].done = true;
    --block.left_;
  }

  static inline Block* current_ = nullptr;
  static inline std::vector<std::unique_ptr<char[]>> stacks_;  // for one block after another
  const std::function<void()>& body_;
  std::vector<Fiber> fibers_;
  std::vector<double> shown_;
  ucontext_t outside_;
  unsigned now_ = 0;
  size_t left_;
};

// The value of thread `from`, to every thread that asks: two meetings, so that nobody shows the next one early.
template <class T>
T exchanged(T value, unsigned from) {
  Block::shown(threadIdx.x) = value;
  Block::meet();
  const T theirs = static_cast<T>(Block::shown(from));
  Block::meet();
  return theirs;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return exchanged(value, threadIdx.x / 32 * 32 + lane);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int) {
  return exchanged(value, threadIdx.x ^ mask);
}

inline void __syncthreads() { Block::meet(); }

template <class T>
T __ldcs(const T* from) {
  return *from;
}

template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}

template <auto kernel>
int64_t resident_blocks(int) {
  return 3;
}

template <auto kernel, class... Arguments>
void launch(const char*, int64_t blocks, int threads, Stream, const Arguments&... arguments) {
  blockDim.x = threads;
  gridDim.x = static_cast<unsigned>(blocks);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    Block::run(threads, [&] { kernel(arguments...); });
  }
}

}  // namespace npuzero::cuda
