// Row updates in a caller's array, by row number: [L, D], row i at i * D. Threads may update different rows at once.
#pragma once

#include <cstdint>

#include "base/common.hpp"
#include "optimizers/optimizer.hpp"
#include "rows/step_history.hpp"
#include "values/kernels.hpp"

namespace geartrain {

struct ArrayUpdate {
  char* rows;        // [L, D] of dtype
  char* slots;       // [L, slot_dim(D)] of slot_dtype; null: there are none
  int64_t* steps;    // [L], update count of each row, with a CatchUp its last step; null: not counted
  int64_t dim;
  DType dtype;
  DType slot_dtype;
  int64_t first_id;    // id of row 0; the others follow
  uint64_t rounding_key;
  const int64_t* ids;  // ids of the rows of a call; null: consecutive from first_id
};

struct GivenStep {
  const Optimizer& optimizer;
  PushFactors push;
  const CatchUp* catch_up = nullptr;  // where untouched rows move; it reaches back to all rows
};

// out[i] = rows[numbers[i]], [N, D].
void gather_rows(const float* rows, int64_t dim, const int64_t* numbers, int64_t count, float* out);

// out[i] = the row numbers[i] (null: i), caught up, as the table would store it, [N, D].
void read_rows(const ArrayUpdate& given, const int64_t* numbers, int64_t count, const CatchUp& catch_up, float* out);

// Applies one push to distinct rows and their slots; numbers null: rows 0 .. count-1. A row that would not be finite
// afterwards, or whose gradient is not, stays unchanged, with slot and step. Returns the number of such rows.
int64_t update_rows(const ArrayUpdate& given, const int64_t* numbers, int64_t count, const float* gradients,
                    const GivenStep& step);

}  // namespace geartrain
