// The contract is in ops/norm.h.
#include "ops/norm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>

#include "cpu/convert.h"
#include "cpu/parallel.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

constexpr int lanes = 32;
// Vectors by name: an array of lanes would be kept in memory from one step of the loop to the next. A square is exact
// in f64, so that adding it in the same instruction, where there is one, changes no bit.
#if defined(__AVX512F__)
using Doubles = __m512d;
// With a full mask: the plain form warns of a variable that gcc itself leaves unset.
inline Doubles widen(__m256 x) { return _mm512_maskz_cvtps_pd(0xff, x); }
inline Doubles widen(const float* x) { return widen(_mm256_loadu_ps(x)); }
inline Doubles add_square(Doubles sum, Doubles x) { return _mm512_fmadd_pd(x, x, sum); }
inline Doubles widen(const uint16_t* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return widen(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
}
#elif defined(__AVX2__)
using Doubles = __m256d;
inline Doubles widen(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
inline Doubles add_square(Doubles sum, Doubles x) { return _mm256_fmadd_pd(x, x, sum); }
inline Doubles widen(const uint16_t* x) {
  const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
}
#elif defined(__x86_64__)
using Doubles = __m128d;
inline Doubles widen(const float* x) { return _mm_set_pd(x[1], x[0]); }
inline Doubles add_square(Doubles sum, Doubles x) { return sum + x * x; }
inline Doubles widen(const uint16_t* x) { return _mm_set_pd(BF16::widen(x[1]), BF16::widen(x[0])); }
#elif defined(__aarch64__)
using Doubles = float64x2_t;
inline Doubles widen(const float* x) { return vcvt_f64_f32(vld1_f32(x)); }
inline Doubles add_square(Doubles sum, Doubles x) { return vfmaq_f64(sum, x, x); }
inline Doubles widen(const uint16_t* x) {
  const float pair[] = {BF16::widen(x[0]), BF16::widen(x[1])};
  return widen(pair);
}
#endif
constexpr int width = sizeof(Doubles) / sizeof(double);

struct Partial {
  double sum, bad;
};

// The lanes of one block.
struct Lanes {
  Doubles sums[lanes / width] = {};

  // Of F32 or BF16.
  template <class Source>
  void add(const typename Source::Bits* x, int64_t n) {
    const int64_t whole = n / lanes * lanes;
    for (int64_t i = 0; i < whole; i += lanes) {
      for (int k = 0; k < lanes / width; ++k) {
        sums[k] = add_square(sums[k], widen(x + i + k * width));
      }
    }
    for (int64_t i = whole; i < n; ++i) {
      const double value = Source::widen(x[i]);
      sums[(i - whole) / width][(i - whole) % width] += value * value;
    }
  }

  // As long as whole vectors lie apart, these are added.
  double total() const {
    Doubles sum[lanes / width];
    std::memcpy(sum, sums, sizeof sum);
    for (int apart = lanes / width / 2; apart > 0; apart /= 2) {
      for (int k = 0; k < apart; ++k) sum[k] += sum[k + apart];
    }
    double last[width];
    std::memcpy(last, sum, sizeof last);
    for (int apart = width / 2; apart > 0; apart /= 2) {
      for (int lane = 0; lane < apart; ++lane) last[lane] += last[lane + apart];
    }
    return last[0];
  }
};

template <class Source>
int64_t count_bad(const typename Source::Bits* x, int64_t n) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad += (bits_of(Source::widen(x[i])) & 0x7f800000u) == 0x7f800000u;
  return bad;
}

template <class Source>
Partial finish(const Lanes& lane, const typename Source::Bits* x, int64_t n) {
  const double sum = lane.total();
  // No square of a finite f32 overflows, nor does a sum of 2^63 of them: the sum is finite where every element is.
  return {sum, std::isfinite(sum) ? 0.0 : static_cast<double>(count_bad<Source>(x, n))};
}

template <class Source>
Partial block(const typename Source::Bits* x, int64_t n) {
  Lanes lane;
  if constexpr (std::is_same_v<Source, F16>) {
    float wide[tile];
    for (int64_t i = 0; i < n; i += tile) {
      const int64_t count = std::min(tile, n - i);
      convert<F16, F32>(x + i, wide, count);
      lane.add<F32>(wide, count);
    }
  } else {
    lane.add<Source>(x, n);
  }
  return finish<Source>(lane, x, n);
}

template <class Addend>
Partial add_block(float* __restrict x, const typename Addend::Bits* __restrict addend, float scale, int64_t n) {
  Lanes lane;
  for (int64_t i = 0; i < n; i += tile) {
    const int64_t count = std::min(tile, n - i);
#pragma omp simd
    for (int64_t k = i; k < i + count; ++k) x[k] = x[k] + Addend::widen(addend[k]) * scale;
    lane.add<F32>(x + i, count);
  }
  return finish<F32>(lane, x, n);
}

}  // namespace

void norm(const NormArgs& args, Stream) {
  const int64_t n = args.x.count, blocks = norm_blocks(n);
  auto* partials = static_cast<Partial*>(args.workspace.data);
  const int threads = n < serial_below ? 1 : omp_get_max_threads();
  const auto each = [&](const auto& of_block) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = b * norm_block;
      partials[b] = of_block(begin, std::min(norm_block, n - begin));
    }
  };
  with_float(args.addend ? args.addend->dtype : args.x.dtype, [&](auto dtype) {
    using Type = decltype(dtype);
    using Bits = typename Type::Bits;
    if (args.addend) {
      auto* x = static_cast<float*>(args.x.data);
      const auto* addend = static_cast<const Bits*>(args.addend->data);
      each([&](int64_t at, int64_t count) { return add_block<Type>(x + at, addend + at, args.scale, count); });
    } else {
      const auto* x = static_cast<const Bits*>(args.x.data);
      each([&](int64_t at, int64_t count) { return block<Type>(x + at, count); });
    }
  });
  for (int64_t apart = 1; apart < blocks; apart *= 2) {
    for (int64_t b = 0; b + apart < blocks; b += 2 * apart) {
      partials[b].sum += partials[b + apart].sum;
      partials[b].bad += partials[b + apart].bad;
    }
  }
  const Partial total = blocks ? partials[0] : Partial{0, 0};
  auto* out = static_cast<double*>(args.out.data);
  out[0] = total.sum, out[1] = total.bad;
}

}  // namespace npuzero::cpu::NPUZERO_ISA
