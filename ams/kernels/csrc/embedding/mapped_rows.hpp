// Rows in a mapped file, found by the hashes of their ids: opening builds nothing, and processes share it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

struct MappedRows {
  const int64_t* starts;  // [2^bits + 1]: start of each range of hashes in `ids`, and the number of ids
  const int64_t* ids;     // [count], those of a range in any order
  const char* rows;       // [count, row_bytes]
  int64_t count;
  int bits;
  size_t row_bytes;

  // Copies the row of ids[i] to place i of `out`, whose rows begin `stride` bytes after one another. The places of ids
  // without a row go to `missing`, rising; returns how many. Never looks outside the arrays, whatever `starts` holds.
  int64_t pull(const int64_t* wanted, int64_t num_wanted, char* out, size_t stride, int64_t* missing) const;
};

}  // namespace geartrain
