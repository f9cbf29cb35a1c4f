// Products of unit rows, filtered by a floor: the inner loop of building a table of neighbours.
//
// Compiled for every instruction set. No part of the bit contract: the table does not depend on the last bits of these
// products (neighbour_recall.hpp).
#pragma once

#include <cstdint>

namespace geartrain {

// A product above the floor of its row or of its column; places count within the panel call.
struct Hit {
  int32_t row;
  int32_t column;
  float score;
};

struct NeighbourKernels {
  int64_t panel_columns;
  int64_t tile_rows;
  // out[k][j] = rows[j, k] for the panel's columns, 0 beyond `count`; dim * panel_columns floats.
  void (*pack_panel)(const float* rows, int64_t count, int64_t dim, float* out);
  // Writes every product above min(row floor, column floor) of rows [num_rows, dim] and a packed panel, and returns how
  // many. num_rows is a multiple of tile_rows; column_floors is [panel_columns]; hits has room for num_rows *
  // panel_columns.
  int64_t (*panel_hits)(const float* rows, int64_t num_rows, int64_t dim, const float* panel, const float* row_floors,
                        const float* column_floors, Hit* hits);
};

const NeighbourKernels& neighbour_kernels();

}  // namespace geartrain
