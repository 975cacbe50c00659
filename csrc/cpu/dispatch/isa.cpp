#include "cpu/dispatch/isa.h"

#include "core/check.h"
#include "core/kernel_table.h"
#include "ops/ops.h"

// The cpu kernels: each exists once per instruction set, as npuzero::cpu::<isa>::<op>.
#define NPUZERO_FILL(op, Args) set_kernel<Args>(Device::cpu, &op);
#define NPUZERO_ISA_TABLE(isa)              \
  namespace npuzero::cpu::isa {             \
  NPUZERO_OPS(NPUZERO_DECLARE)              \
  void fill() { NPUZERO_OPS(NPUZERO_FILL) } \
  }

#ifdef NPUZERO_BUILT_baseline
NPUZERO_ISA_TABLE(baseline)
#endif
#ifdef NPUZERO_BUILT_neon
NPUZERO_ISA_TABLE(neon)
#endif
#ifdef NPUZERO_BUILT_avx2
NPUZERO_ISA_TABLE(avx2)
#endif
#ifdef NPUZERO_BUILT_avx512
NPUZERO_ISA_TABLE(avx512)
#endif

namespace npuzero::cpu {
namespace {

struct Isa {
  const char* name;
  bool supported;
  void (*fill)();
};

std::vector<Isa> isas() {
  std::vector<Isa> list;
#ifdef NPUZERO_BUILT_baseline
  list.push_back({"baseline", true, &baseline::fill});
#endif
#ifdef NPUZERO_BUILT_neon
  list.push_back({"neon", true, &neon::fill});
#endif
#ifdef NPUZERO_BUILT_avx2
  const bool avx2_here =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  list.push_back({"avx2", avx2_here, &avx2::fill});
#endif
#ifdef NPUZERO_BUILT_avx512
  const bool avx512_here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  list.push_back({"avx512", avx512_here, &avx512::fill});
#endif
  return list;
}

std::string current;

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.emplace_back(isa.name);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) {
    if (isa.supported) names.emplace_back(isa.name);
  }
  return names;
}

std::string current_isa() { return current; }

void use_isa(const std::string& wanted) {
  const std::string choice = wanted == "auto" ? supported_isas().back() : wanted;
  for (const Isa& isa : isas()) {
    if (choice == isa.name && isa.supported) {
      isa.fill();
      current = choice;
      return;
    }
  }
  throw Error(Error::Kind::Config, "NPUZERO_ISA", "one of auto, " + join(supported_isas()),
              choice + " (built here: " + join(built_isas()) + ")",
              "Unset NPUZERO_ISA, or name an instruction set that this machine has.");
}

}  // namespace npuzero::cpu
