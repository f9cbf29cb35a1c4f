// Building a table of neighbours: recall of the best by float32 products, then their exact scores.
//
// Recall keeps for each row at least the `keep` best products seen and a floor that no product left out exceeds. The
// exact score of two unit rows is the sum, in double and in a fixed order, of the exact products of their float32
// columns: the table depends on nothing else, neither on threads nor on the order of blocks nor on the instruction set.
#pragma once

#include <cstdint>

#include "base/common.hpp"

namespace geartrain {

// The running best of some rows, unordered. Capacity is above `keep`.
struct RunningBest {
  float* scores;   // [rows, capacity]
  int32_t* ids;    // [rows, capacity]
  int32_t* counts; // [rows]
  float* floors;   // [rows], at first -infinity
  uint8_t* locks;  // [rows], 0
  int64_t capacity;
  int64_t keep;

  bool exists() const { return scores != nullptr; }
};

// Unit rows [count, dim]. Row i is class ids[i], or first + i without ids.
struct UnitRows {
  const float* rows;
  int64_t count;
  const int32_t* ids;
  int64_t first;

  int32_t id(int64_t row) const { return ids == nullptr ? static_cast<int32_t>(first + row) : ids[row]; }
};

// Offers every product of a row of `a` and one of `b` to the best of either, where they exist; a class never meets
// itself. With `same`, a and b are one block and each pair counts once. Up to `threads` threads.
void recall_pairs(const UnitRows& a, const RunningBest& best_a, const UnitRows& b, const RunningBest& best_b,
                  int64_t dim, bool same, int64_t threads);

// Leaves the `keep` best of each row and raises its floor to the least of them, if it has more.
void trim_best(const RunningBest& best, int64_t count, int64_t threads);

// Divides each row by its length, in double. A row of zeros stays. Returns the first row that is not finite, or -1.
int64_t make_unit_rows(float* rows, int64_t count, int64_t dim, int64_t threads);

// scores[i, j] = exact score of row i of `a` and class ids[i, j], where that is in `b`; others stay.
void exact_scores(const float* a, int64_t count, int64_t dim, const int32_t* ids, const int32_t* counts, int64_t width,
                  const float* b, int64_t first_b, int64_t count_b, double* scores, int64_t threads);

// Offers the exact scores of all pairs to the k best of each row of `a` (best first; counts say how many there are).
void exact_best(const UnitRows& a, const UnitRows& b, int64_t dim, int64_t k, double* scores, int32_t* ids,
                int32_t* counts, int64_t threads);

// Writes the k best by (score falling, id rising) of each row's candidates. accepted[i] = whether nothing that the
// recall left out can be among them: the k-th exact score is above floor + error_bound.
void rank_candidates(const double* scores, const int32_t* ids, const int32_t* counts, int64_t width,
                     const float* floors, int64_t count, double error_bound, int64_t k, int32_t* out, uint8_t* accepted,
                     int64_t threads);

}  // namespace geartrain
