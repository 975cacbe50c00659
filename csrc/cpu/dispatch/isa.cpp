#include "cpu/dispatch/isa.h"

#include "core/check.h"
#include "core/kernel_table.h"

namespace npuzero::cpu {
namespace {

struct Isa {
  const char* name;
  bool supported;
  void (*install)();
};

std::vector<Isa> isas() {
  std::vector<Isa> list = {{"baseline", true, [] {}}};
#ifdef NPUZERO_BUILT_avx2
  __builtin_cpu_init();
  list.push_back({"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"), [] {}});
#endif
#ifdef NPUZERO_BUILT_avx512
  list.push_back({"avx512",
                  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
                  [] {}});
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
  const std::string choice = wanted.empty() ? supported_isas().back() : wanted;
  for (const Isa& isa : isas()) {
    if (choice == isa.name && isa.supported) {
      isa.install();
      current = choice;
      return;
    }
  }
  throw Error(Error::Kind::Config, "NPUZERO_ISA", "one of " + join(supported_isas()),
              choice + " (built here: " + join(built_isas()) + ")",
              "Unset NPUZERO_ISA, or name an instruction set that this machine has.");
}

}  // namespace npuzero::cpu
