#include "base/fingerprint.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "base/keyed_hash.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace geartrain {
namespace {

constexpr uint64_t kFirst = 0x87c37b91114253d5ull, kSecond = 0x4cf5ad432745937full;
constexpr size_t kBlock = 16, kChunk = 1024;
constexpr size_t kShift = 4;  // offset between the keys of both sums

struct Keys {
  Keys() {
    for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(splitmix64(hash_seed + i));
  }
  std::array<uint32_t, kChunk / 4 + kShift> words;
};

inline uint64_t mixed_low(uint64_t word) { return std::rotl(word * kFirst, 31) * kSecond; }
inline uint64_t mixed_high(uint64_t word) { return std::rotl(word * kSecond, 33) * kFirst; }

inline void add_block(Fingerprint& state, const char* block) {
  uint64_t words[2];
  std::memcpy(words, block, kBlock);
  state.low = (std::rotl(state.low ^ mixed_low(words[0]), 27) + state.high) * 5 + 0x52dce729u;
  state.high = (std::rotl(state.high ^ mixed_high(words[1]), 31) + state.low) * 5 + 0x38495ab5u;
}

uint64_t avalanche(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

// Adds the last bytes, fewer than a block, and the total number of bytes.
Fingerprint ended(Fingerprint state, const char* rest, size_t count) {
  uint64_t words[2] = {0, 0};
  if (count % kBlock != 0) std::memcpy(words, rest, count % kBlock);
  state.low ^= mixed_low(words[0]) ^ count;
  state.high ^= mixed_high(words[1]) ^ count;
  state.low += state.high;
  state.high += state.low;
  state.low = avalanche(state.low);
  state.high = avalanche(state.high);
  state.low += state.high;
  state.high += state.low;
  return state;
}

// Two sums of products of pairs of words, each word with a key added.
void nh(const char* chunk, const Keys& keys, uint64_t* sums) {
#if defined(__x86_64__)
  __m128i first = _mm_setzero_si128(), second = first;
  const auto load = [](const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); };
  const auto product = [](__m128i pair) { return _mm_mul_epu32(pair, _mm_srli_epi64(pair, 32)); };
  for (size_t i = 0; i < kChunk / 4; i += 4) {
    const __m128i words = load(chunk + 4 * i);
    first = _mm_add_epi64(first, product(_mm_add_epi32(words, load(keys.words.data() + i))));
    second = _mm_add_epi64(second, product(_mm_add_epi32(words, load(keys.words.data() + i + kShift))));
  }
  const auto sum = [](__m128i lanes) { return _mm_add_epi64(lanes, _mm_unpackhi_epi64(lanes, lanes)); };
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), sum(first));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums + 1), sum(second));
#else
  uint32_t words[kChunk / 4];
  std::memcpy(words, chunk, kChunk);
  sums[0] = sums[1] = 0;
  for (size_t i = 0; i < kChunk / 4; i += 2) {
    const uint32_t *key = keys.words.data() + i, *later = key + kShift;
    sums[0] += uint64_t{words[i] + key[0]} * (words[i + 1] + key[1]);
    sums[1] += uint64_t{words[i] + later[0]} * (words[i + 1] + later[1]);
  }
#endif
}

}  // namespace

Fingerprint murmur3(const void* bytes, size_t count, Fingerprint state) {
  const char* at = static_cast<const char*>(bytes);
  for (size_t block = 0; block < count / kBlock; ++block, at += kBlock) add_block(state, at);
  return ended(state, at, count);
}

Fingerprint fingerprint(const void* bytes, size_t count, Fingerprint state) {
  static const Keys keys;
  const char* at = static_cast<const char*>(bytes);
  for (size_t chunk = 0; chunk < count / kChunk; ++chunk, at += kChunk) {
    uint64_t sums[2];
    nh(at, keys, sums);
    add_block(state, reinterpret_cast<const char*>(sums));
  }
  for (size_t block = 0; block < count % kChunk / kBlock; ++block, at += kBlock) add_block(state, at);
  return ended(state, at, count);
}

}  // namespace geartrain
