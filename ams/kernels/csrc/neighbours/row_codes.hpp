// Rows quantized to one byte a column, in a file and in memory: 16 rows to a panel.
//
// A panel is [quads + 3][16] words of 4 bytes, quads = columns / 4, rounded up. Word [q][r] holds columns 4 q .. 4 q +
// 3 of row r, each a byte: code + 128, so that code * scale is about the value; columns beyond the last are 128. Three
// words follow for each row, float32: its scale, the length of what its codes leave out, and its own length, the last
// two rounded up.
#pragma once

#include <cstdint>
#include <vector>

namespace geartrain {

inline constexpr int64_t kPanelRows = 16;
inline constexpr int kCodeZero = 128;
inline constexpr int64_t kMaxColumns = int64_t{1} << 16;  // sums of products of codes stay below 2^31

inline constexpr int64_t quads_of(int64_t dim) { return (dim + 3) / 4; }
inline constexpr int64_t panel_bytes(int64_t dim) { return (quads_of(dim) + 3) * kPanelRows * 4; }
inline constexpr int64_t panels_of(int64_t count) { return (count + kPanelRows - 1) / kPanelRows; }

// Writes the panels of finite rows [count, dim]. Rows beyond `count` of the last one are zeros.
void encode_rows(const float* rows, int64_t count, int64_t dim, uint8_t* panels, int64_t threads);

// Bounds of the product of a feature with any row. Products are of the feature times 2^-exponent.
struct FeatureBounds {
  float scale;     // code * scale is about the feature
  float length;    // length of the feature
  float left_out;  // length of the part that codes leave out; both are rounded up, with room for rounding of the bounds
  float slack;     // absolute error beside that; infinity: no bound is known
  float unit;      // 2^-exponent, factor of offsets
  int32_t start;   // -128 * sum of the codes: corrects for the offset of row codes
  int exponent;
};

// Writes the codes [4 * quads] of one finite feature [dim], which are of seven bits: the products of two pairs of bytes
// fit 16 bits.
FeatureBounds encode_feature(const float* feature, int64_t dim, float largest_offset, int8_t* codes);

}  // namespace geartrain
