// The contract is in ops/pack.h.
#include "ops/pack.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "cpu/write.h"

namespace npuzero::cpu::NPUZERO_ISA {
namespace {

template <class Source, class Target>
void move(const PackArgs& args, const PackPart& part, float scale, bool streaming, int64_t begin, int64_t end) {
  using Bits = typename Target::Bits;
  const auto* from = static_cast<const typename Source::Bits*>(part.source) + begin;
  auto* to = static_cast<Bits*>(part.target) + begin;
  write(to, end - begin, streaming, [&](Bits* __restrict target, int64_t first, int64_t n) {
    const auto* __restrict source = from + first;
    if (args.accumulate) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        target[i] = Target::round(Target::widen(target[i]) + Source::widen(source[i]) * scale);
      }
    } else if (args.scaled) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) target[i] = Target::round(Source::widen(source[i]) * scale);
    } else {
      convert<Source, Target>(source, target, n);
    }
  });
}

}  // namespace

void pack(const PackArgs& args, Stream) {
  const float scale = args.scale_at ? args.factor * *args.scale_at : args.factor;
  int64_t bytes = 0;
  for (int64_t i = 0; i < args.part_count; ++i) bytes += args.parts[i].count * itemsize(args.parts[i].target_dtype);
  const bool streaming = !args.accumulate && bytes >= stream_bytes;
  for_line(args.parts, args.part_count, args.total, [&](const PackPart& part, int64_t begin, int64_t end) {
    with_float(part.source_dtype, [&](auto source) {
      with_float(part.target_dtype, [&](auto target) {
        move<decltype(source), decltype(target)>(args, part, scale, streaming, begin, end);
      });
    });
  });
}

}  // namespace npuzero::cpu::NPUZERO_ISA
