// Update of one row by its table's optimizer, in any memory; where untouched rows move, the row is caught up first.
#pragma once

#include "optimizers/optimizer.hpp"
#include "rows/step_history.hpp"
#include "values/kernels.hpp"

namespace geartrain {

struct RowUpdate {
  Magnitudes largest;
  int64_t number;  // new number of the row: its update count, with a CatchUp its last step
  bool is_late;    // whether the row had a gradient in this step already
};

// Updates a float32 row and its slots, whose number is `number`. `catch_up`: where untouched rows move; it reaches back
// to the row.
inline RowUpdate update_row(const Optimizer& optimizer, const CatchUp* catch_up, Ranges ranges, float* row,
                            float* slots, const float* gradient, size_t dim, const PushFactors& push, int64_t number) {
  if (catch_up == nullptr)
    return {optimizer.update(row, slots, gradient, dim, push, number + 1), number + 1, false};
  const Kernels& k = kernels();
  if (const Elapsed* elapsed = catch_up->of(number)) k.move(row, slots, dim, *elapsed, ranges);
  const int64_t step = catch_up->now() + 1;
  if (number < step) return {optimizer.update(row, slots, gradient, dim, push, step), step, false};
  const Ranges largest = k.add_late(row, slots, gradient, dim, push);
  return {{static_cast<float>(largest.row), {static_cast<float>(largest.slot)}}, step, true};
}

}  // namespace geartrain
