// Compiled once per instruction set, as GEARTRAIN_CLASS_PASS; see CMakeLists.txt. Everything but the table at the end
// has internal linkage, and no inline function of another header is used: it might be merged with that of a lesser CPU.
#include "softmax/class_pass.hpp"

#if defined(__AMX_BF16__)
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
#if defined(GEARTRAIN_BFLOAT16_PRODUCTS)
constexpr int64_t kPanel = 32;  // columns of one panel of the products
#else
constexpr int64_t kPanel = 2 * kLanes;  // columns of one packed panel: kTileRows x 2 vectors fill the registers
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int64_t kSamples = 256;    // samples processed at a time
constexpr int64_t kTileFloats = 192 * 128;  // approximate size of a tile's unit rows
constexpr int64_t kMaxRows = 192;  // of a tile
constexpr int64_t kSkew = 16;        // floats between rows of a tile, so that they do not share cache sets

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t panels(int64_t width) { return (width + kPanel - 1) / kPanel; }
constexpr int64_t padded(int64_t width) { return panels(width) * kPanel; }

Vector load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
void store(float* at, Vector value) { *reinterpret_cast<Unaligned*>(at) = value; }

#if defined(GEARTRAIN_BFLOAT16_PRODUCTS)
#include "softmax/class_pass_products_bfloat16.hpp"
#else
#include "softmax/class_pass_products_float32.hpp"
#endif
static_assert(kFewestRows % kRowStep == 0 && kMaxRows % kRowStep == 0, "products write whole steps of rows");
static_assert(kFewestRows >= kMaxCenters, "a tile holds whole classes");

// 2^x within 2e-7, 0 below about 2^-126, infinity from about 2^127.5 on; NaN stays. Minimax polynomial on [-1/2, 1/2].
Vector exp2(Vector x) {
  const Vector low = Vector{} - 127.0f, high = Vector{} + 128.0f;
  const Vector above = x < low ? low : x;
  const Vector clamped = above > high ? high : above;
  const Vector shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the sum has no room for a fraction
  const Vector whole = shifted - 12582912.0f;
  const Vector f = clamped - whole;
  Vector power = f * 1.53458121e-04f + 1.33999313e-03f;
  power = power * f + 9.61848896e-03f;
  power = power * f + 5.55032878e-02f;
  power = power * f + 2.40226469e-01f;
  power = power * f + 6.93147206e-01f;
  power = power * f + 1.0f;
  const Integers exponent = ((Integers)shifted - 0x4B400000 + 127) << 23;
  return power * (Vector)exponent;  // an exponent of -127 is the number 0
}

float total(Vector value) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += value[i];
  return sum;
}

int64_t stride_of(int64_t dim) { return padded(dim) + kSkew; }
constexpr int64_t kLogitStride = kSamples + kSkew;

int64_t tile_rows_for(int64_t dim) {
  return least(kMaxRows, most(kFewestRows, kTileFloats / stride_of(dim) / kRowStep * kRowStep + kRowStep));
}

// Arrays of a tile, in a core's cache.
struct Tile {
  Tile(int64_t dim, float* scratch)
      : rows(tile_rows_for(dim)), stride(stride_of(dim)), products(rows, dim, scratch) {
    unit = scratch + Products::size(rows, dim);
    gradient = unit + rows * stride;
    logits = gradient + rows * stride;
    inverse = logits + rows * kLogitStride;
  }
  static int64_t size(int64_t dim) {
    const int64_t rows = tile_rows_for(dim);
    return Products::size(rows, dim) + rows * (2 * stride_of(dim) + kLogitStride + 1);
  }

  int64_t rows;
  int64_t stride;
  Products products;
  float* unit;      // [rows, stride], columns beyond D are 0
  float* gradient;  // [rows, stride]
  float* logits;    // [rows, kLogitStride], of up to kSamples samples
  float* inverse;   // [rows] 1 / length
};

// Lengths below this count as this, as in torch.nn.functional.normalize.
constexpr float kNormFloor = 1e-12f;

void load_unit_rows(Tile& tile, const float* rows, int64_t count, int64_t dim, bool normalised) {
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t r = 0; r < count; ++r) {
    const float* in = rows + r * dim;
    float* out = tile.unit + r * tile.stride;
    Vector squares = {};
    for (int64_t d = 0; d < whole; d += kLanes) squares += load(in + d) * load(in + d);
    float square = total(squares);
    for (int64_t d = whole; d < dim; ++d) square += in[d] * in[d];
    const float length = __builtin_sqrtf(square);
    const float inverse = !normalised ? 1.0f : 1.0f / (length < kNormFloor ? kNormFloor : length);
    tile.inverse[r] = inverse;
    for (int64_t d = 0; d < whole; d += kLanes) store(out + d, load(in + d) * inverse);
    for (int64_t d = whole; d < dim; ++d) out[d] = in[d] * inverse;
    for (int64_t d = dim; d < padded(dim); ++d) out[d] = 0;
  }
}

void copy(const float* in, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = in[i];
}

// Calls visit(first row of the class within the tile, sample) for the targets whose `centers` rows are among
// first .. first + count - 1, and the block's samples.
template <class Visit>
void for_targets(const Targets& targets, int64_t centers, int64_t first, int64_t count, int64_t sample, int64_t samples,
                 Visit visit) {
  for (int64_t i = 0; i < targets.count; ++i) {
    const int64_t row = (targets.rows[i] - targets.first_row) * centers - first, at = targets.samples[i];
    if (row >= 0 && row < count && at >= sample && at < sample + samples) visit(row, at);
  }
}

void make_logits(const PackedBatch& batch, Tile& tile, int64_t count, int64_t sample, int64_t samples) {
  tile.products.logits(batch, tile.unit, tile.stride, count, sample, samples, tile.logits, kLogitStride);
}

// Keeps for each sample the largest logit of a class, the first of equal ones; its other centers become -infinity.
void choose_centers(Tile& tile, int64_t count, int64_t samples, int64_t centers) {
  const Vector none = Vector{} - __builtin_inff();
  for (int64_t r = 0; r < count; r += centers)
    for (int64_t at = 0; at < samples; at += kLanes) {
      float* const logits = tile.logits + r * kLogitStride + at;
      Vector best = load(logits);
      for (int64_t k = 1; k < centers; ++k) {
        const Vector value = load(logits + k * kLogitStride);
        best = best < value ? value : best;
      }
      Integers taken = {};
      for (int64_t k = 0; k < centers; ++k) {
        const Vector value = load(logits + k * kLogitStride);
        const Integers left_out = (value < best) | taken;  // a NaN is not left out
        taken |= ~left_out;
        store(logits + k * kLogitStride, left_out ? none : value);
      }
    }
}

// Returns the index of the largest value at intervals of `stride`, the first of equal ones.
int64_t largest_of(const float* values, ptrdiff_t stride, int64_t count) {
  int64_t largest = 0;
  for (int64_t k = 1; k < count; ++k)
    if (values[largest * stride] < values[k * stride]) largest = k;
  return largest;
}

// `offsets` are those of the tile's classes, or null.
void add_offsets(Tile& tile, int64_t count, int64_t samples, const float* offsets, int64_t centers) {
  if (offsets == nullptr) return;
  for (int64_t r = 0; r < count; ++r) {
    float* const logits = tile.logits + r * kLogitStride;
    const float offset = offsets[r / centers];
    for (int64_t at = 0; at < samples; at += kLanes) store(logits + at, load(logits + at) + offset);
  }
}

// Returns 2^offset of row r.
float row_weight(const float* offsets, int64_t r) { return offsets == nullptr ? 1.0f : exp2(Vector{} + offsets[r])[0]; }

void add_rows(const Tile& tile, int64_t count, int64_t dim, const float* offsets, double* sum) {
  for (int64_t r = 0; r < count; ++r) {
    const float weight = row_weight(offsets, r);
    const float* const unit = tile.unit + r * tile.stride;
    for (int64_t d = 0; d < dim; ++d) sum[d] += static_cast<double>(weight * unit[d]);
  }
}

void add_common(const Tile& tile, int64_t count, int64_t dim, const float* offsets, const float* common) {
  for (int64_t r = 0; r < count; ++r) {
    const float weight = row_weight(offsets, r);
    float* const gradient = tile.gradient + r * tile.stride;
    for (int64_t d = 0; d < dim; ++d) gradient[d] += weight * common[d];
  }
}

const float* from(const float* offsets, int64_t first) { return offsets == nullptr ? nullptr : offsets + first; }

// Returns the largest of the tile's logits of kLanes samples.
Vector largest_logits(const Tile& tile, int64_t count, int64_t at) {
  Vector highest = load(tile.logits + at);
  for (int64_t r = 1; r < count; ++r) {
    const Vector logits = load(tile.logits + r * kLogitStride + at);
    highest = highest < logits ? logits : highest;
  }
  return highest;
}

// highest[b] = the larger of it and the tile's largest logit
void note_highest(const Tile& tile, int64_t count, int64_t samples, float* highest) {
  for (int64_t at = 0; at < samples; at += kLanes) {
    const Vector largest = largest_logits(tile, count, at);
    for (int64_t i = 0; i < least(kLanes, samples - at); ++i)
      if (highest[at + i] < largest[i]) highest[at + i] = largest[i];
  }
}

// Raises shift to the tile's largest logits and shrinks the sums to match.
void raise_shift(const ForwardChunk& chunk, const Tile& tile, int64_t count, int64_t sample, int64_t samples,
                 int64_t dim) {
  for (int64_t at = 0; at < samples; at += kLanes) {
    const Vector highest = largest_logits(tile, count, at);
    for (int64_t i = 0; i < least(kLanes, samples - at); ++i) {
      const int64_t b = sample + at + i;
      const float before = chunk.shift[b], now = highest[i];
      if (!(before < now)) continue;
      chunk.shift[b] = now;
      const float shrink = exp2(Vector{} + (before - now))[0];
      chunk.sum[b] *= static_cast<double>(shrink);
      if (chunk.weighted != nullptr)
        for (int64_t d = 0; d < dim; ++d) chunk.weighted[b * dim + d] *= shrink;
    }
  }
}

struct NextRows {
  NextRows(const float* all, int64_t from, int64_t num_rows, int64_t most, int64_t width)
      : rows(all + from * width), count(least(most, num_rows - from)), dim(width) {}
  const float* rows;
  int64_t count;  // may be negative
  int64_t dim;
};

// tile.logits[r, b ...] = change(values[r, b ...], b), kLanes samples at a time. Meanwhile prefetches the next tile's
// rows.
template <class Change>
void fill_logits(Tile& tile, int64_t count, const float* values, ptrdiff_t stride, int64_t samples, NextRows next,
                 Change change) {
  for (int64_t r = 0; r < count; ++r) {
    if (r < next.count)
      for (int64_t d = 0; d < next.dim; d += 16) __builtin_prefetch(next.rows + r * next.dim + d, 0, 2);
    const float* in = values + r * stride;
    float* out = tile.logits + r * kLogitStride;
    int64_t at = 0;
    for (; at + kLanes <= samples; at += kLanes) store(out + at, change(load(in + at), at));
    if (at == samples) continue;
    alignas(64) float rest[kLanes] = {};
    copy(in + at, samples - at, rest);
    store(out + at, change(load(rest), at));
  }
}

// tile.logits[r, b] = exp2(logits[r, b] - shift[b]); the columns' sums are added to `sum`. Shift and sum may be null.
void exponentiate(Tile& tile, int64_t count, const float* logits, ptrdiff_t stride, const float* shift, double* sum,
                  int64_t samples, NextRows next) {
  alignas(64) float low[kSamples] = {}, sums[kSamples] = {};
  if (shift != nullptr) copy(shift, samples, low);
  fill_logits(tile, count, logits, stride, samples, next, [&](Vector logit, int64_t at) {
    const Vector value = exp2(logit - load(low + at));
    store(sums + at, load(sums + at) + value);
    return value;
  });
  for (int64_t i = 0; sum != nullptr && i < samples; ++i) sum[i] += static_cast<double>(sums[i]);
}

// tile.logits[r, b] = exponentials[r, b] * 2^-log_sum[b], by its root twice: the factor itself may underflow.
void weigh(Tile& tile, int64_t count, const float* exponentials, ptrdiff_t stride, const float* log_sum,
           int64_t samples, NextRows next) {
  alignas(64) float roots[kSamples] = {};
  copy(log_sum, samples, roots);
  for (int64_t at = 0; at < samples; at += kLanes) store(roots + at, exp2(load(roots + at) * -0.5f));
  fill_logits(tile, count, exponentials, stride, samples, next,
              [&](Vector value, int64_t at) { return value * load(roots + at) * load(roots + at); });
}

void keep(const Tile& tile, const ForwardChunk& chunk, int64_t first, int64_t count, int64_t sample, int64_t samples,
          int64_t batch) {
  for (int64_t r = 0; r < count; ++r)
    copy(tile.logits + r * kLogitStride, samples, chunk.kept + (first + r) * batch + sample);
}

void forward(const PackedBatch& batch, const ForwardChunk& chunk, float* scratch) {
  Tile tile(batch.dim, scratch);
  const int64_t dim = batch.dim, centers = batch.centers, most = tile.rows / centers * centers;
  uint8_t own[kSamples] = {};  // center of its own class that each sample has chosen, if it is in the tile
  for (int64_t first = 0; first < chunk.num_rows; first += most) {
    const int64_t count = least(most, chunk.num_rows - first);
    load_unit_rows(tile, chunk.rows + first * dim, count, dim, chunk.normalised);
    tile.products.take_units(tile.unit, tile.stride, count, true, chunk.weighted != nullptr);
    if (chunk.row_sum != nullptr) add_rows(tile, count, dim, from(chunk.offsets, first), chunk.row_sum);
    const NextRows next(chunk.rows, first + count, chunk.num_rows, most, dim);
    for (int64_t sample = 0; sample < batch.batch; sample += kSamples) {
      const int64_t samples = least(kSamples, batch.batch - sample);
      make_logits(batch, tile, count, sample, samples);
      if (centers > 1) choose_centers(tile, count, samples, centers);
      const bool keeps = chunk.kept != nullptr, shifts = chunk.shift != nullptr;
      // Targets are in no sum, so they must not raise the shift: the others might underflow.
      for_targets(chunk.targets, centers, first, count, sample, samples, [&](int64_t row, int64_t b) {
        float* const logits = tile.logits + row * kLogitStride + b - sample;
        const int64_t center = largest_of(logits, kLogitStride, centers);
        own[b - sample] = static_cast<uint8_t>(center);
        copy(tile.unit + (row + center) * tile.stride, dim, chunk.target_rows + b * dim);
        for (int64_t k = 0; k < centers; ++k) logits[k * kLogitStride] = -__builtin_inff();
      });
      if (chunk.highest != nullptr) note_highest(tile, count, samples, chunk.highest + sample);
      add_offsets(tile, count, samples, from(chunk.offsets, first / centers), centers);
      if (keeps && shifts) keep(tile, chunk, first, count, sample, samples, batch.batch);
      if (shifts) raise_shift(chunk, tile, count, sample, samples, dim);
      exponentiate(tile, count, tile.logits, kLogitStride, shifts ? chunk.shift + sample : nullptr, chunk.sum + sample,
                   samples, next);
      if (keeps && !shifts) keep(tile, chunk, first, count, sample, samples, batch.batch);
      if (keeps && centers > 1)
        for_targets(chunk.targets, centers, first, count, sample, samples, [&](int64_t row, int64_t b) {
          chunk.kept[(first + row + own[b - sample]) * batch.batch + b] = 1.0f;
        });
      if (chunk.weighted != nullptr)
        tile.products.add_weighted(tile.logits, kLogitStride, tile.unit, tile.stride, count, samples, dim,
                                   chunk.weighted + sample * dim);
    }
  }
}

// out = factor * inverse * (g - (g·ŵ) ŵ), or factor * g where rows are not normalised.
void fold_row(const float* gradient, const float* unit, float inverse, const GradientChunk& chunk, int64_t dim,
              float* out, GradientSums& sums) {
  const int64_t whole = dim / kLanes * kLanes;
  Vector products = {};
  for (int64_t d = 0; d < whole; d += kLanes) products += load(gradient + d) * load(unit + d);
  float along = total(products);
  for (int64_t d = whole; d < dim; ++d) along += gradient[d] * unit[d];
  const float weight = chunk.factor * inverse, less = chunk.normalised ? along * weight : 0.0f;
  Vector checks = {}, squares = {};
  for (int64_t d = 0; d < whole; d += kLanes) {
    const Vector value = load(gradient + d) * weight - load(unit + d) * less;
    checks += value - value;
    squares += value * value;
    store(out + d, value);
  }
  float check = total(checks), square = total(squares);
  for (int64_t d = whole; d < dim; ++d) {
    const float value = gradient[d] * weight - unit[d] * less;
    check += value - value;
    square += value * value;
    out[d] = value;
  }
  sums.check += check;
  sums.squares += square;
}

GradientSums gradient(const PackedBatch& batch, const GradientChunk& chunk, float* scratch) {
  Tile tile(batch.dim, scratch);
  const int64_t dim = batch.dim, centers = batch.centers, most = tile.rows / centers * centers;
  uint8_t own[kSamples] = {};  // as in the forward pass
  GradientSums sums;
  for (int64_t first = 0; first < chunk.num_rows; first += most) {
    const int64_t count = least(most, chunk.num_rows - first);
    load_unit_rows(tile, chunk.rows + first * dim, count, dim, chunk.normalised);
    tile.products.take_units(tile.unit, tile.stride, count, chunk.kept == nullptr, false);
    const NextRows next(chunk.rows, first + count, chunk.num_rows, most, dim);
    for (int64_t sample = 0; sample < batch.batch; sample += kSamples) {
      const int64_t samples = least(kSamples, batch.batch - sample);
      if (chunk.kept == nullptr) {
        make_logits(batch, tile, count, sample, samples);
        if (centers > 1) choose_centers(tile, count, samples, centers);
        add_offsets(tile, count, samples, from(chunk.offsets, first / centers), centers);
      }
      const float* logits = chunk.kept == nullptr ? tile.logits : chunk.kept + first * batch.batch + sample;
      const ptrdiff_t stride = chunk.kept == nullptr ? kLogitStride : batch.batch;
      if (centers > 1)
        for_targets(chunk.targets, centers, first, count, sample, samples, [&](int64_t row, int64_t b) {
          own[b - sample] = static_cast<uint8_t>(largest_of(logits + row * stride + b - sample, stride, centers));
        });
      if (chunk.kept != nullptr && chunk.kept_exponentials)
        weigh(tile, count, logits, stride, chunk.log_sum + sample, samples, next);
      else
        exponentiate(tile, count, logits, stride, chunk.log_sum + sample, nullptr, samples, next);
      for_targets(chunk.targets, centers, first, count, sample, samples, [&](int64_t row, int64_t b) {
        tile.logits[(row + own[b - sample]) * kLogitStride + b - sample] =
            Products::kRounds ? 0.0f : chunk.target_weight[b];
      });
      tile.products.gradients(batch, tile.logits, kLogitStride, count, sample, samples, tile.gradient, tile.stride,
                              sample > 0);
      // The targets' part is the largest by far, and mostly along the row: it is not rounded.
      if (Products::kRounds)
        for_targets(chunk.targets, centers, first, count, sample, samples, [&](int64_t row, int64_t b) {
          for (int64_t d = 0; d < dim; ++d)
            tile.gradient[(row + own[b - sample]) * tile.stride + d] +=
                chunk.target_weight[b] * batch.features[b * dim + d];
        });
    }
    if (chunk.common != nullptr) add_common(tile, count, dim, from(chunk.offsets, first), chunk.common);
    for (int64_t r = 0; r < count; ++r)
      fold_row(tile.gradient + r * tile.stride, tile.unit + r * tile.stride, tile.inverse[r], chunk, dim,
               chunk.rows + (first + r) * dim, sums);
  }
  return sums;
}

}  // namespace

extern const ClassPass GEARTRAIN_CLASS_PASS;
const ClassPass GEARTRAIN_CLASS_PASS = {&packed_size, &pack, &Tile::size, &forward, &gradient};

}  // namespace geartrain
