// Compiled once per instruction set, as GEARTRAIN_NEIGHBOURS; see CMakeLists.txt. Everything but the table at the end
// has internal linkage, and no inline function of another header is used: it might be merged with that of a lesser CPU.
#include "neighbours/neighbour_kernels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace geartrain {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 6;
#else
constexpr int kLanes = 4, kTileRows = 6;
#endif
constexpr int64_t kPanel = 2 * kLanes;  // kTileRows x 2 vectors fill the registers

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(float))));

Vector load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
void store(float* at, Vector value) { *reinterpret_cast<Unaligned*>(at) = value; }
Vector lesser(Vector a, Vector b) { return a < b ? a : b; }

// Returns a bit for each lane that is all ones.
uint32_t mask_of(Integers lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)lanes);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)lanes));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(lanes[i] & 1) << i;
  return mask;
#endif
}

// Products of a tile, at tile[row][column].
using Tile = float[kTileRows][kPanel];

// Computes the products of a tile; writes them, and returns true, only if any of them is above its floor.
bool make_tile(const float* rows, int64_t dim, const float* panel, const float* row_floors, Vector low_floors,
               Vector high_floors, Tile& tile) {
  Vector sums[kTileRows][2] = {};
  for (int64_t k = 0; k < dim; ++k) {
    const Vector low = load(panel), high = load(panel + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const Vector value = rows[i * dim + k] - Vector{};
      sums[i][0] += value * low;
      sums[i][1] += value * high;
    }
    panel += kPanel;
  }
  Integers above = {};
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    const Vector floor = row_floors[i] - Vector{};
    above |= sums[i][0] > lesser(floor, low_floors);
    above |= sums[i][1] > lesser(floor, high_floors);
  }
  if (mask_of(above) == 0) return false;
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    store(tile[i], sums[i][0]);
    store(tile[i] + kLanes, sums[i][1]);
  }
  return true;
}

int64_t panel_hits(const float* rows, int64_t num_rows, int64_t dim, const float* panel, const float* row_floors,
                   const float* column_floors, Hit* hits) {
  const Vector low_floors = load(column_floors), high_floors = load(column_floors + kLanes);
  Hit* next = hits;
  alignas(64) Tile tile;
  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    if (!make_tile(rows + first * dim, dim, panel, row_floors + first, low_floors, high_floors, tile)) continue;
    for (int i = 0; i < kTileRows; ++i) {
      const Vector floor = row_floors[first + i] - Vector{};
      uint32_t mask = mask_of(load(tile[i]) > lesser(floor, low_floors)) |
                      mask_of(load(tile[i] + kLanes) > lesser(floor, high_floors)) << kLanes;
      for (; mask != 0; mask &= mask - 1) {
        const int column = __builtin_ctz(mask);
        *next++ = {static_cast<int32_t>(first + i), column, tile[i][column]};
      }
    }
  }
  return next - hits;
}

void pack_panel(const float* rows, int64_t count, int64_t dim, float* out) {
  for (int64_t k = 0; k < dim; ++k)
    for (int64_t j = 0; j < kPanel; ++j) *out++ = j < count ? rows[j * dim + k] : 0.0f;
}

}  // namespace

extern const NeighbourKernels GEARTRAIN_NEIGHBOURS;
const NeighbourKernels GEARTRAIN_NEIGHBOURS = {kPanel, kTileRows, &pack_panel, &panel_hits};

}  // namespace geartrain
