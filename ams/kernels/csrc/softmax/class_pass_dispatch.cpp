// Which compiled form of the class pass this CPU runs. The arithmetic is in class_pass_kernels.cpp.
#include "softmax/class_pass.hpp"

#include "machine/isa.hpp"

#if defined(GEARTRAIN_COMPILES_AMX) && defined(__linux__)
#define GEARTRAIN_USES_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace geartrain {

extern const ClassPass class_pass_baseline;
#if defined(__x86_64__)
extern const ClassPass class_pass_avx2;
extern const ClassPass class_pass_avx512;

const ClassPass& class_pass() {
  switch (active_isa()) {
    case Isa::avx512: return class_pass_avx512;
    case Isa::avx2: return has_fused_multiply_add() ? class_pass_avx2 : class_pass_baseline;
    default: return class_pass_baseline;
  }
}
#else
const ClassPass& class_pass() { return class_pass_baseline; }
#endif

extern const ClassPass class_pass_bfloat16;
#if defined(GEARTRAIN_USES_AMX)
extern const ClassPass class_pass_amx;

namespace {

// Whether the CPU has the instructions, and the system lets this process use the registers (Linux asks for a wish to be said).
bool may_use_amx() {
  constexpr unsigned kAmxBfloat16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bfloat16 = 1u << 5, kOsxsave = 1u << 27;
  constexpr unsigned kTileState = 3u << 17;  // of XCR0: configuration and data
  constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (active_isa() != Isa::avx512 || !__get_cpuid(1, &a, &b, &c, &d) || (c & kOsxsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBfloat16) == 0 || (d & kAmxTile) == 0) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kAvx512Bfloat16) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

}  // namespace

bool has_bfloat16_unit() {
  static const bool may = may_use_amx();
  return may;
}

const ClassPass& bfloat16_class_pass() { return has_bfloat16_unit() ? class_pass_amx : class_pass_bfloat16; }
#else
bool has_bfloat16_unit() { return false; }

const ClassPass& bfloat16_class_pass() { return class_pass_bfloat16; }
#endif

}  // namespace geartrain
