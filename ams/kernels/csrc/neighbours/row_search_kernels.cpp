// Compiled once per instruction set, as GEARTRAIN_ROW_SEARCH; see CMakeLists.txt. Everything but the table at the end
// has internal linkage, and no inline function of another header is used: it might be merged with that of a lesser CPU.
#include "neighbours/row_search_kernels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace geartrain {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kLargestGroup = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kLargestGroup = 4;
#else
constexpr int kLanes = 4, kLargestGroup = 4;
#endif
constexpr int kRows = 16, kParts = kRows / kLanes;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float UnalignedVector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t UnalignedIntegers __attribute__((vector_size(kLanes * sizeof(float)), aligned(1), may_alias));

Vector load(const void* at) { return (Vector)(Integers)*reinterpret_cast<const UnalignedIntegers*>(at); }
void store(float* at, Vector value) { *reinterpret_cast<UnalignedVector*>(at) = value; }

// sums[r] + the products of the four unsigned bytes of rows[r] and the four signed ones of `codes`.
Integers add_products(Integers sums, Integers rows, int32_t codes) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)rows, _mm512_set1_epi32(codes));
#elif defined(__AVX512F__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)rows, _mm512_set1_epi32(codes));
  return sums + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)rows, _mm256_set1_epi32(codes));
  return sums + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4; ++i)
    sums += ((rows >> (8 * i)) & 255) * static_cast<int32_t>(static_cast<int8_t>(codes >> (8 * i)));
  return sums;
#endif
}

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

template <int kGroup>
BoundHit* group_hits(const uint8_t* panel, int64_t quads, uint32_t rows, const float* offsets, const int8_t* codes,
                     const FeatureBounds* bounds, const float* floors, int64_t first, BoundHit* next) {
  Integers sums[kGroup][kParts];
#pragma GCC unroll 16
  for (int g = 0; g < kGroup; ++g)
    for (int p = 0; p < kParts; ++p) sums[g][p] = bounds[g].start - Integers{};
  for (int64_t q = 0; q < quads; ++q) {
    Integers words[kParts];
    for (int p = 0; p < kParts; ++p) words[p] = (Integers)load(panel + (q * kRows + p * kLanes) * 4);
#pragma GCC unroll 16
    for (int g = 0; g < kGroup; ++g) {
      int32_t four;
      __builtin_memcpy(&four, codes + (q * kGroup + g) * 4, sizeof four);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) sums[g][p] = add_products(sums[g][p], words[p], four);
    }
  }
  const uint8_t* tail = panel + quads * kRows * 4;
  for (int p = 0; p < kParts; ++p) {
    const Vector scale = load(tail + p * kLanes * 4), left_out = load(tail + (kRows + p * kLanes) * 4),
                 length = load(tail + (2 * kRows + p * kLanes) * 4);
    const Vector offset = offsets == nullptr ? Vector{} : load(offsets + p * kLanes);
#pragma GCC unroll 16
    for (int g = 0; g < kGroup; ++g) {
      const FeatureBounds& of = bounds[g];
      const Vector margin = of.length * left_out + of.left_out * length + of.slack;
      const Vector upper = __builtin_convertvector(sums[g][p], Vector) * (scale * of.scale) + offset * of.unit + margin;
      const Integers below = upper < floors[g] - Vector{};  // false for NaN
      uint32_t mask = mask_of(~below) & (rows >> (p * kLanes));
      if (mask == 0) continue;
      float uppers[kLanes], lowers[kLanes];
      store(uppers, upper);
      store(lowers, upper - 2 * margin);
      for (; mask != 0; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        *next++ = {static_cast<int32_t>(first + g), p * kLanes + lane, lowers[lane], uppers[lane]};
      }
    }
  }
  return next;
}

int64_t panel_hits(const uint8_t* panel, int64_t quads, uint32_t rows, const float* offsets, const int8_t* codes,
                   const FeatureBounds* bounds, const float* floors, int64_t num_features, BoundHit* hits) {
  BoundHit* next = hits;
  const auto run = [&]<int kGroup>(int64_t& first) {
    for (; first + kGroup <= num_features; first += kGroup)
      next = group_hits<kGroup>(panel, quads, rows, offsets, codes + first * quads * 4, bounds + first, floors + first,
                                first, next);
  };
  int64_t first = 0;
  run.template operator()<kLargestGroup>(first);
  if constexpr (kLargestGroup > 4) run.template operator()<4>(first);
  run.template operator()<1>(first);
  return next - hits;
}

}  // namespace

extern const RowSearchKernels GEARTRAIN_ROW_SEARCH;
const RowSearchKernels GEARTRAIN_ROW_SEARCH = {kLargestGroup, &panel_hits};

}  // namespace geartrain
