// Run-time choice of the instruction set. Every choice gives the same bits, except products in bfloat16 (Isa::amx);
// GEARTRAIN_ISA forces one for the tests.
#pragma once

namespace geartrain {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2 };

// Instruction set in use: the best of this CPU, or GEARTRAIN_ISA=baseline|avx2|avx512|amx, read once. Vectors are those
// of avx512 under amx, too. Throws std::runtime_error if the variable names an unknown or unsupported one.
Isa active_isa();
// Whether the matrix unit for bfloat16 is in use: `active_isa` is avx512, and GEARTRAIN_ISA is amx or not set.
bool uses_amx();
// Whether the byte dot products of some avx512 CPUs are in use: `active_isa` is avx512, and GEARTRAIN_ISA is amx or not
// set.
bool uses_vnni();
const char* isa_name(Isa isa);
bool has_fused_multiply_add();

#if defined(__x86_64__)
#define GEARTRAIN_TARGET_AVX2 __attribute__((target("avx2")))
#define GEARTRAIN_TARGET_AVX512 \
  __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define GEARTRAIN_TARGET_AVX2
#define GEARTRAIN_TARGET_AVX512
#endif
#define GEARTRAIN_INLINE [[gnu::always_inline]] inline

// Versions<body>: one always-inline function compiled for each instruction set; `pick(isa)` returns the matching one.
template <auto Body>
struct Versions;

template <class Result, class... Args, Result (*Body)(Args...)>
struct Versions<Body> {
  static Result baseline(Args... args) { return Body(args...); }
  GEARTRAIN_TARGET_AVX2 static Result avx2(Args... args) { return Body(args...); }
  GEARTRAIN_TARGET_AVX512 static Result avx512(Args... args) { return Body(args...); }

  static constexpr Result (*pick(Isa isa))(Args...) {
    return isa == Isa::avx512 ? &avx512 : isa == Isa::avx2 ? &avx2 : &baseline;
  }
};

}  // namespace geartrain
