#include "values/rounding.hpp"

#include <cstring>

#include "machine/isa.hpp"
#include "values/half.hpp"
#include "values/kernels.hpp"

namespace geartrain {

extern const RoundingKernels rounding_baseline;
#if defined(__x86_64__)
extern const RoundingKernels rounding_avx2;
extern const RoundingKernels rounding_avx512;
#endif

namespace {

const RoundingKernels& rounding_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::avx512) return rounding_avx512;
  if (active_isa() == Isa::avx2 && has_fused_multiply_add()) return rounding_avx2;
#endif
  return rounding_baseline;
}

}  // namespace

uint64_t rounding_key(uint64_t seed, uint32_t table_hash) { return splitmix64(splitmix64(seed) ^ table_hash); }

void store_rounded(DType dtype, void* out, const float* in, size_t count, const Draw& draw) {
  static const RoundingKernels& kernels = rounding_kernels();
  if (dtype == DType::float32)
    std::memcpy(out, in, count * sizeof(float));
  else
    kernels.store[static_cast<int>(dtype)](static_cast<uint16_t*>(out), in, count, draw);
}

float rounded_to_nearest(float value, DType dtype) {
  uint32_t bits = 0;
  float nearest = 0;
  kernels().store[static_cast<int>(dtype)](&bits, &value, 1);
  kernels().load[static_cast<int>(dtype)](&nearest, &bits, 1);
  return nearest;
}

float rounded_up(float value, DType dtype) {
  constexpr uint16_t kLargestDraw = 0xFFFF;
  switch (dtype) {
    case DType::float32: return value;
    case DType::float16: return from_float16(round_float16(value, kLargestDraw));
    case DType::bfloat16: return from_bfloat16(round_bfloat16(value, kLargestDraw));
  }
  return value;
}

}  // namespace geartrain
