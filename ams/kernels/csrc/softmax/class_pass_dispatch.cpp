// Choice of the compiled form of the class pass for this CPU. The arithmetic is in class_pass_kernels.cpp.
#include "softmax/class_pass.hpp"

#include "machine/isa.hpp"

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
bool has_bfloat16_unit() { return uses_amx(); }

#if defined(GEARTRAIN_COMPILES_AMX)
extern const ClassPass class_pass_amx;

const ClassPass& bfloat16_class_pass() { return has_bfloat16_unit() ? class_pass_amx : class_pass_bfloat16; }
#else
const ClassPass& bfloat16_class_pass() { return class_pass_bfloat16; }
#endif

}  // namespace geartrain
