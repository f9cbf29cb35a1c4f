#include "machine/isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace geartrain {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2")) return Isa::avx2;
#endif
  return Isa::baseline;
}

Isa choose_isa() {
  const char* wish = std::getenv("GEARTRAIN_ISA");
  if (wish == nullptr || *wish == '\0') return best_isa();
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (std::string(wish) != isa_name(isa)) continue;
    if (isa > best_isa())
      throw std::runtime_error(std::string("GEARTRAIN_ISA=") + wish + ", but this CPU has no more than " +
                               isa_name(best_isa()) + "; unset it or name that");
    return isa;
  }
  throw std::runtime_error(std::string("GEARTRAIN_ISA=") + wish + " is unknown; it must be baseline, avx2 or avx512");
}

}  // namespace

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

bool has_fused_multiply_add() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "baseline"; }

}  // namespace geartrain
