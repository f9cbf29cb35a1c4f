// Initial value of a row, before any write: a function of (seed, table, id, column) alone.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key = seed and
// counter = (id low, id high, column / 4, hash of the table's name); word column % 4 belongs to the column.
// uniform: low + (high - low) * word / 2^32 · normal: mean + std * inverse_cdf((word + 1/2) / 2^32), both in double,
// then float32. The inverse CDF is Wichura's AS 241 (PPND16) with a logarithm of our own: only + - * / and sqrt, hence
// equal bits everywhere.
#pragma once

#include <cstdint>

namespace geartrain {

enum class Distribution : int { constant = 0, uniform = 1, normal = 2 };

struct InitialValues {
  Distribution distribution;
  double first;   // value · low · mean
  double second;  // unused · high · std
  uint64_t seed;
  uint32_t table_hash;

  // The float32 values of columns 0 .. dim-1 of row `id`.
  void fill(float* out, int64_t dim, int64_t id) const;
  // Upper bound of all values' magnitudes.
  double bound() const;
};

}  // namespace geartrain
