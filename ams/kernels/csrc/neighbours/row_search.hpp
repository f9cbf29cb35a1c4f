// Exact top-k search of rows for some features.
//
// Products of codes bound each score from both sides. A row whose upper bound is below the k-th best lower bound so far
// is skipped; the others get exact scores (exact_dot.hpp), of which the k best are returned. Near ties and copies only
// increase the number of the others.
#pragma once

#include <cstdint>

namespace geartrain {

struct SearchedRows {
  const float* rows;      // [count, dim], finite
  const uint8_t* panels;  // of encode_rows
  const float* offsets;   // [count], added to the scores, or nullptr
  float largest_offset;   // no magnitude of them is above it
  int64_t count;
  int64_t dim;
};

// Writes the k best of each of finite features [num_features, dim] by (score falling, row rising), where the score is
// the exact one, rounded to float32. `k` is at most the number of rows.
void search_rows(const SearchedRows& rows, const float* features, int64_t num_features, int64_t k, float* scores,
                 int64_t* found, int64_t threads);

}  // namespace geartrain
