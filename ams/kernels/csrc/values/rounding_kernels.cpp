// Compiled once per instruction set, as GEARTRAIN_ROUNDING; see CMakeLists.txt. Everything but the table at the end has
// internal linkage, and no inline function of another header is used that might be merged with that of a lesser CPU:
// those of half.hpp are always inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own header: _mm512_undefined_epi32
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "values/half.hpp"
#include "values/rounding.hpp"

namespace geartrain {
namespace {

// Words of kLanes counters, each in the low half of 64 bits; the high half is ignored, since products read the low one.
// `interleave` writes word 0 .. 3 of counter 0, then of counter 1, ...; order[lane] is the counter in a lane.
#if defined(__AVX512F__)
constexpr int kLanes = 8;
using Words = __m512i;
constexpr uint64_t kOrder[kLanes] = {0, 4, 1, 5, 2, 6, 3, 7};
Words load(const uint64_t* at) { return _mm512_loadu_si512(at); }
Words all(uint64_t word) { return _mm512_set1_epi64(static_cast<int64_t>(word)); }
Words times(Words a, Words b) { return _mm512_mul_epu32(a, b); }
Words high(Words a) { return _mm512_srli_epi64(a, 32); }
Words mix(Words a, Words b, Words c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
Words pair(Words a, Words b) { return _mm512_mask_blend_epi32(0xAAAA, a, _mm512_slli_epi64(b, 32)); }
void interleave(uint16_t* out, Words x0, Words x1, Words x2, Words x3) {
  const Words a = pair(x0, x1), b = pair(x2, x3);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(a, b));
  _mm512_storeu_si512(out + 4 * kLanes, _mm512_unpackhi_epi64(a, b));
}
#elif defined(__AVX2__)
constexpr int kLanes = 4;
using Words = __m256i;
constexpr uint64_t kOrder[kLanes] = {0, 2, 1, 3};
Words load(const uint64_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
Words all(uint64_t word) { return _mm256_set1_epi64x(static_cast<int64_t>(word)); }
Words times(Words a, Words b) { return _mm256_mul_epu32(a, b); }
Words high(Words a) { return _mm256_srli_epi64(a, 32); }
Words mix(Words a, Words b, Words c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
Words pair(Words a, Words b) { return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA); }
void interleave(uint16_t* out, Words x0, Words x1, Words x2, Words x3) {
  const Words a = pair(x0, x1), b = pair(x2, x3);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi64(a, b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4 * kLanes), _mm256_unpackhi_epi64(a, b));
}
#elif defined(__SSE2__)
constexpr int kLanes = 2;
using Words = __m128i;
constexpr uint64_t kOrder[kLanes] = {0, 1};
Words load(const uint64_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
Words all(uint64_t word) { return _mm_set1_epi64x(static_cast<int64_t>(word)); }
Words times(Words a, Words b) { return _mm_mul_epu32(a, b); }
Words high(Words a) { return _mm_srli_epi64(a, 32); }
Words mix(Words a, Words b, Words c) { return _mm_xor_si128(_mm_xor_si128(a, b), c); }
Words pair(Words a, Words b) {
  return _mm_or_si128(_mm_and_si128(a, _mm_set1_epi64x(0xFFFFFFFF)), _mm_slli_epi64(b, 32));
}
void interleave(uint16_t* out, Words x0, Words x1, Words x2, Words x3) {
  const Words a = pair(x0, x1), b = pair(x2, x3);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(a, b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * kLanes), _mm_unpackhi_epi64(a, b));
}
#else
constexpr int kLanes = 1;
using Words = uint64_t;
constexpr uint64_t kOrder[kLanes] = {0};
Words load(const uint64_t* at) { return *at; }
Words all(uint64_t word) { return word; }
Words times(Words a, Words b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
Words high(Words a) { return a >> 32; }
Words mix(Words a, Words b, Words c) { return a ^ b ^ c; }
void interleave(uint16_t* out, Words x0, Words x1, Words x2, Words x3) {
  const Words words[] = {x0, x1, x2, x3};
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 == 0 ? 0 : 16));
}
#endif

constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kAdded0 = 0x9E3779B9u, kAdded1 = 0xBB67AE85u;  // added to the key each round
constexpr int kRounds = 7;
constexpr size_t kColumns = 8;  // columns of one counter

uint32_t low_product(uint32_t a, uint32_t b) { return a * b; }
uint32_t high_product(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }

// Random bits of one row. Its counters differ in word 3 only, so half of the first three rounds is computed once.
class RowDraws {
 public:
  explicit RowDraws(const Draw& draw)
      : key0_(static_cast<uint32_t>(draw.key)),
        key1_(static_cast<uint32_t>(draw.key >> 32)),
        first3_(static_cast<uint32_t>(draw.part) << 16) {
    const uint32_t x0 = static_cast<uint32_t>(draw.id),
                   x1 = static_cast<uint32_t>(static_cast<uint64_t>(draw.id) >> 32);
    const uint32_t x2 = static_cast<uint32_t>(draw.number);
    const uint32_t one0 = high_product(kMultiplier1, x2) ^ x1 ^ key0_;  // word 0 after one round, …
    one1_ = low_product(kMultiplier1, x2) ^ (key0_ + kAdded0);
    one2_ = high_product(kMultiplier0, x0) ^ key1_;
    const uint32_t one3 = low_product(kMultiplier0, x0);
    const uint32_t two2 = high_product(kMultiplier0, one0) ^ one3 ^ (key1_ + kAdded1);
    two3_ = low_product(kMultiplier0, one0) ^ (key1_ + 2 * kAdded1);
    three0_ = high_product(kMultiplier1, two2) ^ (key0_ + 2 * kAdded0);
    three1_ = low_product(kMultiplier1, two2);
    for (uint32_t round = 0; round < kRounds - 3; ++round)
      keys_[round] = {uint32_t{key0_ + (round + 3) * kAdded0}, uint32_t{key1_ + (round + 3) * kAdded1}};
  }

  // out [8 * kLanes * kBlocks]: the random bits from column `column` on.
  template <int kBlocks>
  void write(uint16_t* out, size_t column) const {
    const Words multiplier0 = all(kMultiplier0), multiplier1 = all(kMultiplier1), order = load(kOrder), none = all(0);
    Words x0[kBlocks], x1[kBlocks], x2[kBlocks], x3[kBlocks];
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t counter =
          first3_ + static_cast<uint32_t>(column / kColumns) + static_cast<uint32_t>(block * kLanes);
      // The counters of a block begin at a multiple of its size: their lowest bits are the lane's.
      const Words product1 = times(mix(all(one2_), all(counter), order), multiplier1);
      const Words product0 = times(mix(high(product1), all(one1_), none), multiplier0);
      x0[block] = mix(product1, all(three0_), none);
      x1[block] = all(three1_);
      x2[block] = mix(high(product0), all(two3_), none);
      x3[block] = product0;
    }
    for (const RoundKey& key : keys_) {
      const Words key0 = all(key.word0), key1 = all(key.word1);
      for (int block = 0; block < kBlocks; ++block) {
        const Words product0 = times(x0[block], multiplier0), product1 = times(x2[block], multiplier1);
        x0[block] = mix(high(product1), x1[block], key0);
        x1[block] = product1;
        x2[block] = mix(high(product0), x3[block], key1);
        x3[block] = product0;
      }
    }
    for (int block = 0; block < kBlocks; ++block)
      interleave(out + kColumns * kLanes * static_cast<size_t>(block), x0[block], x1[block], x2[block], x3[block]);
  }

 private:
  uint32_t key0_, key1_, first3_;
  // Parts of the words after a round that do not depend on the column, with the next round's key.
  uint32_t one1_, one2_, two3_, three0_, three1_;
  struct RoundKey {
    uint64_t word0, word1;
  };
  RoundKey keys_[kRounds - 3];  // keys of the rounds after the third
};

// Rounds `count` values by as many random draws.
template <DType dtype>
[[gnu::always_inline]] inline void round_values(uint16_t* __restrict out, const float* __restrict in,
                                                const uint16_t* __restrict draws, size_t count) {
  constexpr bool is_float16 = dtype == DType::float16;
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(in[i]) & 0x7FFFFFFF;
    largest = largest < magnitude ? magnitude : largest;
    out[i] = is_float16 ? round_small_float16(in[i], draws[i]) : round_small_bfloat16(in[i], draws[i]);
  }
  if (largest < (is_float16 ? kLargestFloat16 : kLargestBfloat16)) return;
  for (size_t i = 0; i < count; ++i)
    out[i] = is_float16 ? round_float16(in[i], draws[i]) : round_bfloat16(in[i], draws[i]);
}

template <DType dtype>
void store(uint16_t* __restrict out, const float* __restrict in, size_t count, const Draw& draw) {
  constexpr size_t kWide = 64, kNarrow = kColumns * kLanes > 16 ? kColumns * kLanes : 16;
  constexpr int kWideBlocks = static_cast<int>(kWide / kColumns) / kLanes,
                kNarrowBlocks = static_cast<int>(kNarrow / kColumns) / kLanes;
  const RowDraws draws(draw);
  uint16_t bits[kWide];
  size_t column = 0;
  for (; column + kWide <= count; column += kWide) {
    draws.write<kWideBlocks>(bits, column);
    round_values<dtype>(out + column, in + column, bits, kWide);
  }
  for (; column < count; column += kNarrow) {
    draws.write<kNarrowBlocks>(bits, column);
    round_values<dtype>(out + column, in + column, bits, count - column < kNarrow ? count - column : kNarrow);
  }
}

}  // namespace

extern const RoundingKernels GEARTRAIN_ROUNDING;
const RoundingKernels GEARTRAIN_ROUNDING = {.store = {nullptr, &store<DType::float16>, &store<DType::bfloat16>}};

}  // namespace geartrain
