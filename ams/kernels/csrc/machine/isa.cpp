#include "machine/isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(GEARTRAIN_COMPILES_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

#if defined(GEARTRAIN_COMPILES_AMX) && defined(__linux__)
// Whether the CPU has the instructions, and the system lets this process use the registers (on Linux, a process must
// request them).
bool may_use_amx() {
  constexpr unsigned kAmxBfloat16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bfloat16 = 1u << 5, kOsxsave = 1u << 27;
  constexpr unsigned kTileState = 3u << 17;  // bits of XCR0: configuration and data
  constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (best_isa() != Isa::avx512 || !__get_cpuid(1, &a, &b, &c, &d) || (c & kOsxsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBfloat16) == 0 || (d & kAmxTile) == 0) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kAvx512Bfloat16) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#else
bool may_use_amx() { return false; }
#endif

bool has_vnni() {
#if defined(__x86_64__)
  return best_isa() == Isa::avx512 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

struct Choice {
  Isa isa;
  bool amx;
  bool vnni;
};

Choice choose() {
  const char* wish = std::getenv("GEARTRAIN_ISA");
  const Isa best = best_isa();
  if (wish == nullptr || *wish == '\0') return {best, may_use_amx(), has_vnni()};
  const std::string name(wish);
  if (name == "amx" && may_use_amx()) return {best, true, has_vnni()};
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
    if (name == isa_name(isa) && isa <= best) return {isa, false, false};
  if (name != "baseline" && name != "avx2" && name != "avx512" && name != "amx")
    throw std::runtime_error("GEARTRAIN_ISA=" + name + " is unknown; it must be baseline, avx2, avx512 or amx");
  throw std::runtime_error("GEARTRAIN_ISA=" + name + ", but the best of this CPU is " + isa_name(best) +
                           "; unset it or set it to that");
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

Isa active_isa() { return choice().isa; }

bool uses_amx() { return choice().amx; }

bool uses_vnni() { return choice().vnni; }

bool has_fused_multiply_add() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "baseline"; }

}  // namespace geartrain
