// Products of features and rows of one byte a column, filtered to those that may be among the best.
//
// Compiled for every instruction set. Sums of products of bytes are exact; the bounds are no part of the bit contract.
#pragma once

#include <cstdint>

#include "neighbours/row_codes.hpp"

namespace geartrain {

// A row whose product with a feature is between `lower` and `upper`, and may be above the feature's floor.
struct BoundHit {
  int32_t feature;
  int32_t row;  // in its panel
  float lower;
  float upper;
};

struct RowSearchKernels {
  // Features are processed in groups of this many, 4 or 1. Codes of a group of G are [quads][G][4], group after group.
  int64_t largest_group;
  // Writes the hits of a panel's rows, of which bit r of `rows` says whether row r is one, and returns how many.
  // `offsets` [16] or nullptr; `hits` has room for 16 * num_features.
  int64_t (*panel_hits)(const uint8_t* panel, int64_t quads, uint32_t rows, const float* offsets, const int8_t* codes,
                        const FeatureBounds* bounds, const float* floors, int64_t num_features, BoundHit* hits);
};

inline constexpr int64_t group_size(int64_t left, int64_t largest_group) {
  return left >= largest_group ? largest_group : left >= 4 ? 4 : 1;
}

const RowSearchKernels& row_search_kernels();

}  // namespace geartrain
