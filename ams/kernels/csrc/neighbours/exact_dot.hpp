// Exact score of two rows: the sum, in double and in a fixed order, of the exact products of their float32 columns.
#pragma once

#include <cstdint>

#include "machine/isa.hpp"

namespace geartrain {

inline constexpr int kPartialSums = 16;

// Column d adds to partial sum d mod 16; these are added in pairs. Products of two floats are exact in double, so that
// fused multiply-adds change nothing.
GEARTRAIN_INLINE double exact_dot_body(const float* a, const float* b, int64_t dim) {
  double sums[kPartialSums] = {};
  const int64_t whole = dim / kPartialSums * kPartialSums;
  for (int64_t d = 0; d < whole; d += kPartialSums)
    for (int i = 0; i < kPartialSums; ++i) sums[i] += static_cast<double>(a[d + i]) * static_cast<double>(b[d + i]);
  for (int64_t d = whole; d < dim; ++d) sums[d - whole] += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  for (int width = kPartialSums / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

using ExactDot = double (*)(const float*, const float*, int64_t);
ExactDot exact_dot_of_this_cpu();

}  // namespace geartrain
