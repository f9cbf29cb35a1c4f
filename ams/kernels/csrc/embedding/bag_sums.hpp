// Weighted sums of rows over bags, and their gradients: a shard's part of a hosted field.
#pragma once

#include <cstdint>

namespace geartrain {

// Rows of each bag: the next counts[b] places belong to bag b.
struct RowBags {
  const int32_t* places = nullptr;  // [count], each below num_rows
  int64_t count = 0;
  const int32_t* counts = nullptr;  // [bags], >= 0
  int64_t bags = 0;
  const float* weights = nullptr;  // [count]; null: all 1
  int64_t num_rows = 0;

  // Whether the counts add up to the number of places, and every place is a row's.
  bool is_sound() const;
};

// sums[b] = Σ weight · rows[place] over bag b, [bags, dim], in the order of the places.
void pool_bags(const RowBags& bags, const float* rows, int64_t dim, float* sums);
// gradients[place] = Σ weight · vectors[b] over the places of all bags, [num_rows, dim], in the same order.
void spread_bags(const RowBags& bags, const float* vectors, int64_t dim, float* gradients);

}  // namespace geartrain
