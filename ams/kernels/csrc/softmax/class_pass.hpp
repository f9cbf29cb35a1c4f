// Computation of a class head over a chunk of class rows: logits, exponentials, their weighted sums, row gradients.
//
// Each function is compiled for every instruction set and walks the rows tile by tile, so that a tile's unit rows,
// logits and gradients stay in a core's second-level cache between the products. Unlike the row kernels these are no
// part of the bit contract: instruction sets differ in the last bits (fused multiply-adds, width of the sums).
//
// A class may have K centers: K rows, one after the other, of which the largest logit of each sample is the class's and
// takes its gradient (sub-center ArcFace, Deng et al. 2020, section 3.2).
//
// Legend: N rows of a chunk, K of each class, B samples, D width. Formulas: bridge/head/loss/softmax.py and
// chunk_pass.py, whose TensorPass does the same in tensor operations. Reference in float64:
// tests/unit/ams/kernels/test_class_pass.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

constexpr int64_t kMaxCenters = 32;  // a tile holds all rows of a class

// Both operands of the products, in panels: of the samples for the logits, of the width for the row gradients.
struct PackedBatch {
  int64_t batch;
  int64_t dim;
  int64_t centers;  // K, at most kMaxCenters
  const float* features;  // x̂ [B, D] times each sample's weight in the gradients of rows
  const float* query;  // x̂ times the factor of base-2 logits, as written by `pack`, aligned to 64 bytes
  const float* key;    // `features`, packed in the same way
};

// Cells of the chunk that belong to a sample's own class.
struct Targets {
  const int64_t* rows;  // classes, by their number in the whole that the chunk is a part of
  const int64_t* samples;
  int64_t count;
  int64_t first_row = 0;  // number of the chunk's first class
};

struct ForwardChunk {
  const float* rows;  // [N, D]
  int64_t num_rows;   // N, whole classes
  bool normalised;  // whether rows count by their direction only
  Targets targets;
  const float* offsets;  // [N / K] added to the logits of each class but in the targets' cells; null: 0
  float* target_rows;  // [B, D]: the (unit) rows of the targets found here, of several centers the nearest
  float* shift;        // [B] finite; raised to the largest logit but the targets; null: exponentials need none
  double* sum;         // [B] += exp2(logit - shift), targets left out
  float* weighted;     // [B, D] += exp2(logit - shift) * unit row, targets left out; or null
  float* kept;         // [N, B] logits, or with no shift their exponentials; -infinity and 0 of centers that were not
                       // chosen and of the targets, of whose centers the chosen one has 1; or null
  float* highest;      // [B] raised to the largest logit without offsets, targets left out; or null
  double* row_sum;     // [D] += 2^offset * unit row; null, as it must be where classes have several centers
};

struct GradientChunk {
  float* rows;  // [N, D]; each is overwritten by its gradient
  int64_t num_rows;
  bool normalised;
  Targets targets;
  const float* offsets;  // as in the forward pass
  const float* log_sum;        // [B] log2 of the sum of the exponentials
  const float* target_weight;  // [B] derivative at the target's cosine
  const float* kept;           // [N, B] of the forward pass, or null: recomputed
  bool kept_exponentials;      // whether those are exponentials
  float factor;                // multiplies everything
  const float* common;         // [D] added, times 2^offset, to each unit row's part; or null, as `row_sum`
};

// Sums over all gradients of a chunk.
struct GradientSums {
  float check = 0;     // 0, or NaN if one of them is not finite
  double squares = 0;  // of rows in float: 0 or infinite if a row's sum is out of range
};

struct ClassPass {
  int64_t (*packed_size)(int64_t depth, int64_t width);  // floats
  void (*pack)(const float* in, int64_t depth, int64_t width, ptrdiff_t depth_stride, ptrdiff_t width_stride,
               float scale, float* out);
  int64_t (*scratch_size)(int64_t dim);  // floats
  void (*forward)(const PackedBatch& batch, const ForwardChunk& chunk, float* scratch);
  GradientSums (*gradient)(const PackedBatch& batch, const GradientChunk& chunk, float* scratch);
};

const ClassPass& class_pass();

// The same with products of bfloat16 and sums in float32: by the CPU's matrix unit; without one slower than float32.
const ClassPass& bfloat16_class_pass();

// Whether this CPU has such a matrix unit (AMX), and may use it.
bool has_bfloat16_unit();

}  // namespace geartrain
