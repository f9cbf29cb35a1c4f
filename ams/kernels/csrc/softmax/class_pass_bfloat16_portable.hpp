// Part of class_pass_products_bfloat16.hpp: the same blocks in portable C++. Slower than float32; it is there so that
// the arithmetic can be tested on every CPU.
#pragma once

// Rounds to the nearest, ties to even; NaN stays.
Narrow narrowed(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<Narrow>(bits >> 16 | 0x40u);
  return static_cast<Narrow>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

struct MatrixUnit {};

// Writes blocks of A: summand k of row r is in[r * row + k * next].
void blocks_of_a(const float* in, ptrdiff_t row, ptrdiff_t next, int64_t rows, int64_t depth, Narrow* out) {
  const int64_t deep = blocks_of_32(depth);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < deep * 32; ++k)
      out[(r / 16 * deep + k / 32) * kBlock + r % 16 * 32 + k % 32] =
          k < depth ? narrowed(in[r * row + k * next]) : Narrow{0};
}

void blocks_of_rows(const float* in, ptrdiff_t stride, int64_t count, int64_t width, Narrow* out) {
  blocks_of_a(in, stride, 1, count, width, out);
}

void blocks_of_columns(const float* in, ptrdiff_t stride, int64_t count, int64_t width, Narrow* out) {
  blocks_of_a(in, 1, stride, width, count, out);
}

void blocks_of_pairs(const float* in, ptrdiff_t stride, int64_t count, int64_t width, Narrow* out) {
  const int64_t deep = blocks_of_32(count);
  for (int64_t k = 0; k < deep * 32; ++k)
    for (int64_t j = 0; j < blocks_of_32(width) * 32; ++j)
      out[(j / 16 * deep + k / 32) * kBlock + k % 32 / 2 * 32 + j % 16 * 2 + k % 2] =
          k < count && j < width ? narrowed(in[k * stride + j]) : Narrow{0};
}

float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns two neighbouring numbers: the first is the lower half, on little-endian machines.
uint32_t pair_at(const Narrow* at) {
  uint32_t pair;
  __builtin_memcpy(&pair, at, sizeof(pair));
  return pair;
}

void product_block(const Narrow* a, ptrdiff_t a_next, const Narrow* b, ptrdiff_t b_next, int64_t deep, float* c,
                   ptrdiff_t c_row, bool add) {
  constexpr uint32_t kUpper = 0xFFFF0000u;
  for (int64_t i = 0; i < 32; ++i)
    for (int64_t half = 0; half < 2; ++half) {
      float sums[16] = {};
      for (int64_t p = 0; p < deep * 16; ++p) {
        const uint32_t left = pair_at(a + i / 16 * a_next + p / 16 * kBlock + i % 16 * 32 + p % 16 * 2);
        const Narrow* right = b + half * b_next + p / 16 * kBlock + p % 16 * 32;
        const float low = as_float(left << 16), high = as_float(left & kUpper);
        for (int64_t j = 0; j < 16; ++j) {
          const uint32_t pair = pair_at(right + 2 * j);
          sums[j] += low * as_float(pair << 16) + high * as_float(pair & kUpper);
        }
      }
      float* out = c + i * c_row + half * 16;
      for (int64_t j = 0; j < 16; ++j) out[j] = sums[j] + (add ? out[j] : 0.0f);
    }
}
