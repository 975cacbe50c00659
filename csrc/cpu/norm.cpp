// The contract is in ops/norm.h.
#include "ops/norm.h"

#include "cpu/parallel.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

constexpr int lanes = 16;

struct Partial {
  double sum, bad;
};

template <class Source>
Partial block(const typename Source::Bits* x, int64_t n) {
  double sum[lanes] = {};
  int32_t bad[lanes] = {};
  const auto add = [&](int lane, float value) {
    sum[lane] += static_cast<double>(value) * static_cast<double>(value);
    bad[lane] += (bits_of(value) & 0x7f800000u) == 0x7f800000u;
  };
  const int64_t whole = n / lanes * lanes;
  for (int64_t i = 0; i < whole; i += lanes) {
#pragma omp simd
    for (int lane = 0; lane < lanes; ++lane) add(lane, Source::widen(x[i + lane]));
  }
  for (int64_t i = whole; i < n; ++i) add(static_cast<int>(i - whole), Source::widen(x[i]));
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    for (int lane = 0; lane < apart; ++lane) {
      sum[lane] += sum[lane + apart];
      bad[lane] += bad[lane + apart];
    }
  }
  return {sum[0], static_cast<double>(bad[0])};
}

}  // namespace

void norm(const NormArgs& args, Stream) {
  const int64_t n = args.x.count, blocks = norm_blocks(n);
  auto* partials = static_cast<Partial*>(args.workspace.data);
  const int threads = n < serial_below ? 1 : omp_get_max_threads();
  with_float(args.x.dtype, [&](auto dtype) {
    using Source = decltype(dtype);
    const auto* x = static_cast<const typename Source::Bits*>(args.x.data);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = b * norm_block;
      partials[b] = block<Source>(x + begin, n - begin < norm_block ? n - begin : norm_block);
    }
  });
  Partial total = {0, 0};
  for (int64_t b = 0; b < blocks; ++b) {
    total.sum += partials[b].sum;
    total.bad += partials[b].bad;
  }
  auto* out = static_cast<double*>(args.out.data);
  out[0] = total.sum;
  out[1] = total.bad;
}

}  // namespace npuzero::cpu::NPUZERO_ISA
