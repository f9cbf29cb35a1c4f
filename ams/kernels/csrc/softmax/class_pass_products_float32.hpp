// Part of class_pass_kernels.cpp: its three products in float32. One kernel serves all: its operands are given by
// strides, so that nothing is transposed, and only the batch is packed, once a step.
#pragma once

constexpr int64_t kDepth = 256;  // longer sums are computed in pieces: a panel piece is 16 KiB
constexpr int64_t kRowStep = 12, kFewestRows = 48;  // tiles have a multiple of this many rows: whole product tiles

// C[0..M, 0..columns] (= or +=) A[M, depth] * B[depth, kPanel]
template <int M>
void product_tile(const float* a, ptrdiff_t a_row, ptrdiff_t a_depth, const float* b, ptrdiff_t b_depth, int64_t depth,
                  float* c, ptrdiff_t c_row, int64_t columns, bool add) {
  Vector sums[M][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vector low = load(b), high = load(b + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vector value = a[i * a_row] - Vector{};
      sums[i][0] += value * low;
      sums[i][1] += value * high;
    }
    a += a_depth;
    b += b_depth;
  }
  if (columns == kPanel) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      float* out = c + i * c_row;
      if (add) {
        sums[i][0] += load(out);
        sums[i][1] += load(out + kLanes);
      }
      store(out, sums[i][0]);
      store(out + kLanes, sums[i][1]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    float row[kPanel];
    store(row, sums[i][0]);
    store(row + kLanes, sums[i][1]);
    for (int64_t j = 0; j < columns; ++j) c[i * c_row + j] = add ? c[i * c_row + j] + row[j] : row[j];
  }
}

using ProductTile = void (*)(const float*, ptrdiff_t, ptrdiff_t, const float*, ptrdiff_t, int64_t, float*, ptrdiff_t,
                             int64_t, bool);
constexpr ProductTile kProductTiles[] = {
    &product_tile<1>, &product_tile<2>, &product_tile<3>, &product_tile<4>, &product_tile<5>, &product_tile<6>,
#if defined(__AVX512F__)
    &product_tile<7>, &product_tile<8>, &product_tile<9>, &product_tile<10>, &product_tile<11>, &product_tile<12>,
#endif
};

struct Operand {
  const float* data;
  ptrdiff_t row;    // for A: from row to row; for B: from panel to panel
  ptrdiff_t depth;  // from one summand to the next
};

// C[rows, columns] (= or +=) A * B; B is read in whole panels, C written in `columns` columns.
void product(int64_t rows, int64_t columns, int64_t depth, Operand a, Operand b, float* c, ptrdiff_t c_row, bool add) {
  for (int64_t from = 0; from < depth; from += kDepth) {
    const int64_t piece = least(kDepth, depth - from);
    for (int64_t j = 0; j < panels(columns); ++j) {
      const float* panel = b.data + j * b.row + from * b.depth;
      for (int64_t i = 0; i < rows; i += kTileRows) {
        const int64_t height = least(kTileRows, rows - i);
        kProductTiles[height - 1](a.data + i * a.row + from * a.depth, a.row, a.depth, panel, b.depth, piece,
                                  c + i * c_row + j * kPanel, c_row, least(kPanel, columns - j * kPanel),
                                  add || from > 0);
      }
    }
  }
}

int64_t packed_size(int64_t depth, int64_t width) { return depth * padded(width); }

// out[panel][k][j] = scale * in[k, panel * kPanel + j], 0 beyond the width.
void pack(const float* in, int64_t depth, int64_t width, ptrdiff_t depth_stride, ptrdiff_t width_stride, float scale,
          float* out) {
  for (int64_t first = 0; first < padded(width); first += kPanel)
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t j = first; j < first + kPanel; ++j)
        *out++ = j < width ? scale * in[k * depth_stride + j * width_stride] : 0.0f;
}

// The products of one tile need no memory beside its arrays.
struct Products {
  static constexpr bool kRounds = false;

  Products(int64_t, int64_t, float*) {}
  static int64_t size(int64_t, int64_t) { return 0; }

  void take_units(const float*, ptrdiff_t, int64_t, bool, bool) {}

  // logits[r, b] = unit row r times query b
  void logits(const PackedBatch& batch, const float* unit, ptrdiff_t stride, int64_t count, int64_t sample,
              int64_t samples, float* out, ptrdiff_t out_stride) {
    product(count, padded(samples), batch.dim, {unit, stride, 1},
            {batch.query + sample * batch.dim, kPanel * batch.dim, kPanel}, out, out_stride, false);
  }

  // out[b, d] += sum over r of values[r, b] * unit[r, d]
  void add_weighted(const float* values, ptrdiff_t values_stride, const float* unit, ptrdiff_t stride, int64_t count,
                    int64_t samples, int64_t dim, float* out) {
    product(samples, dim, count, {values, 1, values_stride}, {unit, kPanel, stride}, out, dim, true);
  }

  // out[r, d] (= or +=) sum over b of values[r, b] * key[b, d]
  void gradients(const PackedBatch& batch, const float* values, ptrdiff_t values_stride, int64_t count, int64_t sample,
                 int64_t samples, float* out, ptrdiff_t out_stride, bool add) {
    product(count, padded(batch.dim), samples, {values, values_stride, 1},
            {batch.key + sample * kPanel, batch.batch * kPanel, kPanel}, out, out_stride, add);
  }
};
