// Top-k selection of the largest magnitudes of each of many tensors; of equal ones the lower index.
//
// Every tensor is swept once. Elements above a limit survive; the k-th magnitude is computed from the survivors. The
// limit starts from an estimate and rises when there are too many survivors. If an estimate was too high, the tensor is
// swept again: the result does not depend on it.
#pragma once

#include <cstdint>
#include <span>

#include "base/common.hpp"
#include "gradients/sweep.hpp"

namespace geartrain {

// Tensor to select from. gradient and velocity are null if nothing is accumulated.
struct SweptTensor {
  float* values;  // v; of length `numel`
  int64_t numel;
  int64_t k;  // 0 <= k <= numel < 2**31
  const void* gradient = nullptr;
  DType gradient_dtype = DType::float32;
  float* velocity = nullptr;
};

// Updates the state of tensors with a gradient, writes ascending indices and the values of the k largest of each, one
// tensor after the other, and sets the places of tensors with a gradient to 0 in values and velocity, except those that
// are not finite.
// `estimates` [tensors]: limits to start with, 0: unknown; receives those for the next call.
// NaN is larger than infinity. Throws std::bad_alloc before anything is changed.
void take_largest(std::span<const SweptTensor> tensors, const Accumulation& step, float* estimates, int32_t* indices,
                  float* values, int64_t threads);

}  // namespace geartrain
