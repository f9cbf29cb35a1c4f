// float32 rows that lie in somebody else's array, by their numbers: [L, D], row i at i * D. Threads may work on other rows.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace geartrain {

// out[i] = rows[numbers[i]], [N, D].
void gather_rows(const float* rows, int64_t dim, const int64_t* numbers, int64_t count, float* out);

// One push to distinct rows and their slots (null: the rule has none); numbers null: rows 0 .. count-1. What would not be
// finite afterwards, or has a gradient that is not, stays as it is, row and slot. Returns how many rows did.
int64_t update_rows(float* rows, float* slots, int64_t dim, const int64_t* numbers, int64_t count, const float* gradients,
                    Rule rule, StepFactors factors);

}  // namespace geartrain
