// A client's work before sending: merge repeated ids, group ids by shard, and scatter the answers.
#pragma once

#include <cstdint>

#include "base/common.hpp"
#include "machine/pauses.hpp"

namespace geartrain {

// Whether `count` ids are strictly ascending, so that none occurs twice.
bool is_rising(const int64_t* ids, int64_t count);

// Index of the first id that is below 0 or above `last`, or -1.
int64_t first_out_of_range(const int64_t* ids, int64_t count, int64_t last);

// Writes the distinct ids in order of first appearance and, for each of `count` ids, the place of its id among them.
// Returns how many are distinct.
int64_t merge_ids(const int64_t* ids, int64_t count, int64_t* distinct, int64_t* inverse, Pauses* pauses = nullptr);

// sums[inverse[i]] += rows[i] in order of i; `sums` is [num_distinct, dim] and need not be initialised.
void sum_rows(const void* rows, DType dtype, const int64_t* inverse, int64_t count, int64_t dim, int64_t num_distinct,
              float* sums);

// Orders 0 .. count-1 by shard, stably, and counts each shard's ids; `ordered_ids` (null: not wanted) are the ids in
// that order. Every bucket_to_shard value is below num_shards.
void route(const int64_t* ids, int64_t count, const uint16_t* bucket_to_shard, bool dense, int64_t num_shards,
           int64_t* order, int64_t* counts, int64_t* ordered_ids = nullptr);

// Index of the first value that is NaN or infinite, or -1.
int64_t first_non_finite(const void* values, DType dtype, int64_t count);

}  // namespace geartrain
