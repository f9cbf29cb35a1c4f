// Adam on the rows of a push: algorithm 1 of Kingma and Ba, "Adam: A method for stochastic optimization" (ICLR 2015), with the
// decay of the weights in the gradient as torch.optim.Adam has it. ams/kernels/reference/adam.py is the specification.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows/kernels.hpp"

namespace geartrain {

struct AdamSettings {
  double beta1 = 0, beta2 = 0;
  float epsilon = 0;
};

// What one update of a row multiplies by: the same for all of its columns, and for all rows of as many updates.
struct AdamFactors {
  float scale, weight_decay;
  float beta1, rest1;  // rest = 1 - beta
  float beta2, rest2;
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float step_size;     // lr / (1 - beta1^t)
  float epsilon;
};

// Bits of the largest magnitudes after an update, before rounding to a storage type.
struct AdamLargest {
  uint32_t row, first, second;
};

// The factors of a row's update number `t`, from 1.
AdamFactors adam_factors(const AdamSettings& settings, const StepFactors& step, int64_t t);

// For rows of any number of updates: no row moves further than by step_size * (first / epsilon) of these.
AdamFactors adam_bounds(const AdamSettings& settings, const StepFactors& step);

// In float32 and in this order:
//   g = gradient * scale + weight_decay * row;  first = beta1 * first + rest1 * g;  second = beta2 * second + rest2 * g * g;
//   row -= step_size * (first / (sqrt(second) * inverse_root + epsilon))
using AdamUpdate = AdamLargest (*)(float* row, float* first, float* second, const float* gradient, size_t count,
                                   const AdamFactors& factors);
AdamUpdate adam_update();

}  // namespace geartrain
