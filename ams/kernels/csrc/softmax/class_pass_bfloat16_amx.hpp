// Part of class_pass_products_bfloat16.hpp: blocks packed with AVX-512, and multiplied by the matrix unit (AMX) of a
// Xeon.
#pragma once

Narrow narrowed(float value) { return (Narrow)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0); }

// Configures a core's matrix unit while this lives: eight registers of 16 rows of 64 bytes. Another library's
// configuration is restored.
class MatrixUnit {
 public:
  MatrixUnit() {
    _tile_storeconfig(before_);
    alignas(64) unsigned char all[64] = {1};  // palette 1
    for (int i = 0; i < 8; ++i) {
      all[16 + 2 * i] = 64;  // bytes of a row
      all[48 + i] = 16;      // rows
    }
    asm volatile("" : : "r"(all) : "memory");  // GCC does not know that all of it is read
    _tile_loadconfig(all);
  }
  ~MatrixUnit() {
    if (before_[0] != 0)
      _tile_loadconfig(before_);
    else
      _tile_release();
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  alignas(64) unsigned char before_[64];
};

// Returns the next `count` of 16 numbers, padded with zeros.
__m512 sixteen(const float* at, int64_t count) {
  if (count >= 16) return _mm512_loadu_ps(at);
  return count <= 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), at);
}

// low[0], high[0], low[1], high[1], ...
__m512i pairs(__m512 low, __m512 high) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Writes blocks of A from rows of floats: `count` rows, `width` numbers of each.
void blocks_of_rows(const float* in, ptrdiff_t stride, int64_t count, int64_t width, Narrow* out) {
  const int64_t deep = blocks_of_32(width);
  for (int64_t r = 0; r < count; ++r) {
    Narrow* row = out + r / 16 * deep * kBlock + r % 16 * 32;
    for (int64_t k = 0; k < deep; ++k) {
      const float* at = in + r * stride + k * 32;
      const __m512 low = sixteen(at, width - k * 32), high = sixteen(at + 16, width - k * 32 - 16);
      _mm512_store_si512(row + k * kBlock, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

// Returns pairs of rows 2 p and 2 p + 1 of `count`, numbers j .. j + 15 of `width`.
__m512i pairs_of_rows(const float* in, ptrdiff_t stride, int64_t count, int64_t width, int64_t p, int64_t j) {
  const float* at = in + 2 * p * stride + j;
  const __m512 low = 2 * p < count ? sixteen(at, width - j) : _mm512_setzero_ps();
  const __m512 high = 2 * p + 1 < count ? sixteen(at + stride, width - j) : _mm512_setzero_ps();
  return pairs(low, high);
}

// Writes blocks of B, summed over the rows.
void blocks_of_pairs(const float* in, ptrdiff_t stride, int64_t count, int64_t width, Narrow* out) {
  const int64_t deep = blocks_of_32(count);
  for (int64_t p = 0; p < deep * 16; ++p)
    for (int64_t j = 0; j < blocks_of_32(width) * 32; j += 16)
      _mm512_store_si512(out + (j / 16 * deep + p / 16) * kBlock + p % 16 * 32,
                         pairs_of_rows(in, stride, count, width, p, j));
}

// Transposes 16 x 16 numbers of 32 bits.
void transpose(__m512i* rows) {
  __m512i pair[16], four[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    pair[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pair[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    four[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
    four[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
    four[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    four[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(four[i], four[4 + i], 0x88),
                  odd_low = _mm512_shuffle_i32x4(four[i], four[4 + i], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0xDD);
    rows[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    rows[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

// Writes blocks of A, summed over the rows: each column of `width` becomes a row.
void blocks_of_columns(const float* in, ptrdiff_t stride, int64_t count, int64_t width, Narrow* out) {
  const int64_t deep = blocks_of_32(count);
  for (int64_t j = 0; j < blocks_of_32(width) * 32; j += 16)
    for (int64_t k = 0; k < deep; ++k) {
      __m512i rows[16];
#pragma GCC unroll 16
      for (int64_t p = 0; p < 16; ++p) rows[p] = pairs_of_rows(in, stride, count, width, k * 16 + p, j);
      transpose(rows);
      Narrow* block = out + (j / 16 * deep + k) * kBlock;
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(block + i * 32, rows[i]);
    }
}

// c[32, 32] (= or +=) two by two blocks, over `deep` blocks of 32 summands.
void product_block(const Narrow* a, ptrdiff_t a_next, const Narrow* b, ptrdiff_t b_next, int64_t deep, float* c,
                   ptrdiff_t c_row, bool add) {
  const ptrdiff_t stride = c_row * static_cast<ptrdiff_t>(sizeof(float));
  float* const lower = c + 16 * c_row;
  asm volatile("" : : : "memory");  // GCC does not know that the unit reads memory
  if (add) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + 16, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + 16, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < deep; ++k) {
    _tile_loadd(4, a + k * kBlock, 64);
    _tile_loadd(5, a + a_next + k * kBlock, 64);
    _tile_loadd(6, b + k * kBlock, 64);
    _tile_loadd(7, b + b_next + k * kBlock, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + 16, stride);
  asm volatile("" : : : "memory");
}
