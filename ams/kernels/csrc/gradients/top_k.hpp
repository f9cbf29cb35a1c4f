// The k largest magnitudes of each of many tensors; where magnitudes are equal, those of lower index.
//
// Every tensor is swept once. What exceeds a limit survives, the k-th magnitude comes from the survivors alone. The limit starts
// from an estimate and rises whenever there are too many survivors. Where an estimate was too high the tensor is looked at once
// more: the answer does not depend on it.
#pragma once

#include <cstdint>
#include <span>

#include "base/common.hpp"
#include "gradients/sweep.hpp"

namespace geartrain {

// A tensor in which is selected. gradient and velocity are null where nothing is accumulated.
struct SweptTensor {
  float* values;  // v; of length `numel`
  int64_t numel;
  int64_t k;  // 0 <= k <= numel < 2**31
  const void* gradient = nullptr;
  DType gradient_dtype = DType::float32;
  float* velocity = nullptr;
};

// Updates the state of tensors that have a gradient, writes indices, rising within a tensor, and values of the k largest of each,
// one tensor after the other, and sets the places of tensors with a gradient to 0 in values and velocity, but for those that are
// not finite.
// `estimates` [tensors]: the limits to begin with, 0 where nothing is known; those for the next call come back.
// NaN is larger than infinity. Throws std::bad_alloc before anything is changed.
void take_largest(std::span<const SweptTensor> tensors, const Accumulation& step, float* estimates, int32_t* indices,
                  float* values, int64_t threads);

}  // namespace geartrain
