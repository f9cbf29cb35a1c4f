// Mean of a row's squared gradients, for optimizers with one number a row. Its order is part of the specification
// (ams/values/optimizers/rowwise.py): 16 parallel sums, folded in halves, so that every instruction set has the same
// bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "machine/isa.hpp"

namespace geartrain {

// Mean square of direction(0) .. direction(count - 1).
template <class Direction>
GEARTRAIN_INLINE float mean_square(size_t count, const Direction& direction) {
  constexpr size_t kLanes = 16;
  float sums[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float value = direction(i + lane);
      sums[lane] += value * value;
    }
  for (size_t lane = 0; i < count; ++i, ++lane) {
    const float value = direction(i);
    sums[lane] += value * value;
  }
  // Unrolled: a loop over halves would go through memory.
  float eight[kLanes / 2], four[kLanes / 4];
  for (size_t lane = 0; lane < kLanes / 2; ++lane) eight[lane] = sums[lane] + sums[lane + kLanes / 2];
  for (size_t lane = 0; lane < kLanes / 4; ++lane) four[lane] = eight[lane] + eight[lane + kLanes / 4];
  return ((four[0] + four[2]) + (four[1] + four[3])) * (1.0f / static_cast<float>(count));
}

// Upper bound of the mean square of `count` numbers of at most `largest`: infinite if their sum may be. The factor
// covers the rounding of 4,096 additions a lane.
inline float worst_mean_square(float largest, size_t count) {
  const float square = largest * largest * 1.001f;
  return std::isfinite(square * static_cast<float>(count)) ? square : INFINITY;
}

// Upper bound of |x| / (root + epsilon), where root is the root of a mean square of `count` numbers that includes x, in
// a mean with weight at least `weight`. The root is at least |x| * sqrt(weight / count), unless the square of x is no
// normal number: then only epsilon is certain.
inline float worst_quotient(size_t count, float weight, float epsilon) {
  return std::sqrt(static_cast<float>(count) / weight) * std::max(2.0f, 0x1p-62f / epsilon);
}

}  // namespace geartrain
