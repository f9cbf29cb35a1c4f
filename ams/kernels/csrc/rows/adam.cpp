#include "rows/adam.hpp"

#include <bit>
#include <cmath>

#include "base/isa.hpp"

namespace geartrain {
namespace {

// By squaring, from products alone: std::pow rounds differently from one machine to the next.
double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0 && base != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return exponent > 0 ? 0 : result;
}

AdamFactors factors_of(const AdamSettings& settings, const StepFactors& step, double correction1, double correction2) {
  return {.scale = step.scale,
          .weight_decay = step.weight_decay,
          .beta1 = static_cast<float>(settings.beta1),
          .rest1 = static_cast<float>(1 - settings.beta1),
          .beta2 = static_cast<float>(settings.beta2),
          .rest2 = static_cast<float>(1 - settings.beta2),
          .inverse_root = static_cast<float>(1 / std::sqrt(correction2)),
          .step_size = static_cast<float>(static_cast<double>(step.lr) / correction1),
          .epsilon = settings.epsilon};
}

GEARTRAIN_INLINE int32_t magnitude_bits(float value) { return std::bit_cast<int32_t>(value) & 0x7FFFFFFF; }
GEARTRAIN_INLINE int32_t larger(int32_t one, int32_t other) { return one < other ? other : one; }

GEARTRAIN_INLINE AdamLargest update_body(float* __restrict row, float* __restrict first, float* __restrict second,
                                         const float* __restrict gradient, size_t count, const AdamFactors& factors) {
  const AdamFactors f = factors;
  int32_t largest_row = 0, largest_first = 0, largest_second = 0;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * f.scale + f.weight_decay * row[i];
    const float mean = f.beta1 * first[i] + f.rest1 * direction;
    const float square = f.beta2 * second[i] + f.rest2 * direction * direction;
    const float weight = row[i] - f.step_size * (mean / (std::sqrt(square) * f.inverse_root + f.epsilon));
    first[i] = mean;
    second[i] = square;
    row[i] = weight;
    largest_row = larger(largest_row, magnitude_bits(weight));
    largest_first = larger(largest_first, magnitude_bits(mean));
    largest_second = larger(largest_second, magnitude_bits(square));
  }
  return {static_cast<uint32_t>(largest_row), static_cast<uint32_t>(largest_first), static_cast<uint32_t>(largest_second)};
}

constexpr AdamUpdate kUpdates[] = {Versions<&update_body>::pick(Isa::baseline), Versions<&update_body>::pick(Isa::avx2),
                                   Versions<&update_body>::pick(Isa::avx512)};

}  // namespace

AdamFactors adam_factors(const AdamSettings& settings, const StepFactors& step, int64_t t) {
  return factors_of(settings, step, 1 - power(settings.beta1, t), 1 - power(settings.beta2, t));
}

AdamFactors adam_bounds(const AdamSettings& settings, const StepFactors& step) {
  return factors_of(settings, step, 1 - settings.beta1, 1);
}

AdamUpdate adam_update() { return kUpdates[static_cast<int>(active_isa())]; }

}  // namespace geartrain
