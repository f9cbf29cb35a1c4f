// Part of class_pass_kernels.cpp: its three products, of bfloat16 operands with sums in float32: by the matrix unit
// (AMX) of a Xeon, or by plain C++ with the same result up to the rounding of sums.
//
// The unit multiplies contiguous blocks of 1 KiB:  C[16, 16] += A[16, 32] * B[32, 16].
// A block of A is its 16 rows; one of B is 16 rows, too, of pairs: row p holds B[2p, j], B[2p + 1, j] for j = 0 .. 15.
// Blocks are in the order [16 rows or columns][32 summands]. Rows, columns and summands are padded to 32, summands with
// zeros.
#pragma once

constexpr int64_t kRowStep = 32, kFewestRows = 64;
constexpr int64_t kBlock = 512;  // numbers of a block

typedef uint16_t Narrow;  // a bfloat16

constexpr int64_t blocks_of_32(int64_t size) { return (size + 31) / 32; }

#if defined(__AMX_BF16__)
#include "softmax/class_pass_bfloat16_amx.hpp"
#else
#include "softmax/class_pass_bfloat16_portable.hpp"
#endif

// C[rows, columns] (= or +=) A * B. With `whole`, C is written in whole blocks of 32 x 32. The summands are `deep`
// blocks of A from its first and as many of B from b; blocks of the next 16 columns are b_next apart.
void product(int64_t rows, int64_t columns, int64_t deep, const Narrow* a, const Narrow* b, ptrdiff_t b_next, float* c,
             ptrdiff_t c_row, bool add, bool whole) {
  const ptrdiff_t a_next = deep * kBlock;
  alignas(64) float edge[32 * 32];
  for (int64_t i = 0; i < rows; i += 32)
    for (int64_t j = 0; j < columns; j += 32) {
      const Narrow *left = a + i / 16 * a_next, *right = b + j / 16 * b_next;
      float* out = c + i * c_row + j;
      if (whole || (i + 32 <= rows && j + 32 <= columns)) {
        product_block(left, a_next, right, b_next, deep, out, c_row, add);
        continue;
      }
      product_block(left, a_next, right, b_next, deep, edge, 32, false);
      for (int64_t y = 0; y < least(32, rows - i); ++y)
        for (int64_t x = 0; x < least(32, columns - j); ++x)
          out[y * c_row + x] = edge[y * 32 + x] + (add ? out[y * c_row + x] : 0.0f);
    }
}

// Size in floats, each of which holds two numbers.
int64_t packed_size(int64_t depth, int64_t width) { return blocks_of_32(depth) * blocks_of_32(width) * kBlock; }

// Writes blocks of B: out = scale * in[k, j], k the summands.
void pack(const float* in, int64_t depth, int64_t width, ptrdiff_t depth_stride, ptrdiff_t width_stride, float scale,
          float* out) {
  Narrow* narrow = reinterpret_cast<Narrow*>(out);
  const int64_t deep = blocks_of_32(depth);
  for (int64_t j = 0; j < blocks_of_32(width) * 32; ++j)
    for (int64_t k = 0; k < deep * 32; ++k)
      narrow[(j / 16 * deep + k / 32) * kBlock + k % 32 / 2 * 32 + j % 16 * 2 + k % 2] =
          j < width && k < depth ? narrowed(scale * in[k * depth_stride + j * width_stride]) : Narrow{0};
}

// Operands of one tile's products, as blocks.
struct Products {
  static constexpr bool kRounds = true;

  Products(int64_t rows, int64_t dim, float* scratch) : dim_(dim) {
    units_ = reinterpret_cast<Narrow*>(scratch);
    unit_pairs_ = units_ + rows * blocks_of_32(dim) * 32;
    values_ = unit_pairs_ + rows * blocks_of_32(dim) * 32;
  }
  static int64_t size(int64_t rows, int64_t dim) { return rows * (blocks_of_32(dim) * 32 + kSamples / 2); }

  void take_units(const float* unit, ptrdiff_t stride, int64_t count, bool for_logits, bool for_sums) {
    if (for_logits) blocks_of_rows(unit, stride, count, dim_, units_);
    if (for_sums) blocks_of_pairs(unit, stride, count, dim_, unit_pairs_);
  }

  // logits[r, b] = unit row r times query b
  void logits(const PackedBatch& batch, const float*, ptrdiff_t, int64_t count, int64_t sample, int64_t samples,
              float* out, ptrdiff_t out_stride) {
    const int64_t deep = blocks_of_32(dim_);
    const Narrow* query = reinterpret_cast<const Narrow*>(batch.query) + sample / 16 * deep * kBlock;
    product(count, samples, deep, units_, query, deep * kBlock, out, out_stride, false, true);
  }

  // out[b, d] += sum over r of values[r, b] * unit[r, d]
  void add_weighted(const float* values, ptrdiff_t values_stride, const float*, ptrdiff_t, int64_t count,
                    int64_t samples, int64_t dim, float* out) {
    const int64_t deep = blocks_of_32(count);
    blocks_of_columns(values, values_stride, count, samples, values_);
    product(samples, dim, deep, values_, unit_pairs_, deep * kBlock, out, dim, true, false);
  }

  // out[r, d] (= or +=) sum over b of values[r, b] * key[b, d]
  void gradients(const PackedBatch& batch, const float* values, ptrdiff_t values_stride, int64_t count, int64_t sample,
                 int64_t samples, float* out, ptrdiff_t out_stride, bool add) {
    const Narrow* key = reinterpret_cast<const Narrow*>(batch.key) + sample / 32 * kBlock;
    blocks_of_rows(values, values_stride, count, samples, values_);
    product(count, dim_, blocks_of_32(samples), values_, key, blocks_of_32(batch.batch) * kBlock, out, out_stride, add,
            true);
  }

 private:
  MatrixUnit unit_;
  int64_t dim_;
  Narrow* units_;       // blocks of A [rows, D]
  Narrow* unit_pairs_;  // blocks of B [rows, D]
  Narrow* values_;      // blocks of A [rows, samples] or [samples, rows]
};
