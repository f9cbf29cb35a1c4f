#include "class_pass.hpp"

#include "isa.hpp"

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

}  // namespace geartrain
