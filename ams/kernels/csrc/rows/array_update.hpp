// Rows that lie in somebody else's array, by their numbers: [L, D], row i at i * D. Threads may work on other rows.
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
  int64_t* steps;    // [L], how often each row was updated, with a CatchUp its last step; null where nothing counts
  int64_t dim;
  DType dtype;
  DType slot_dtype;
  int64_t first_id;    // of row 0; the next ones follow
  uint64_t rounding_key;
  const int64_t* ids;  // of the rows of a call, which then do not follow one another; null: see first_id
};

struct GivenStep {
  const Optimizer& optimizer;
  PushFactors push;
  const CatchUp* catch_up = nullptr;  // where rows move in steps without a gradient; it reaches back to all of them
};

// out[i] = rows[numbers[i]], [N, D].
void gather_rows(const float* rows, int64_t dim, const int64_t* numbers, int64_t count, float* out);

// out[i] = what the row numbers[i] (null: i) has become, as the table would store it, [N, D].
void read_rows(const ArrayUpdate& given, const int64_t* numbers, int64_t count, const CatchUp& catch_up, float* out);

// One push to distinct rows and their slots; numbers null: rows 0 .. count-1. What would not be finite afterwards, or has a
// gradient that is not, stays as it is, row, slot and step. Returns how many rows did.
int64_t update_rows(const ArrayUpdate& given, const int64_t* numbers, int64_t count, const float* gradients, const GivenStep& step);

}  // namespace geartrain
