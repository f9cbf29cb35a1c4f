#include "base/fingerprint.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "base/isa.hpp"

namespace geartrain {
namespace {

constexpr uint64_t kFirst = 0x87c37b91114253d5ull, kSecond = 0x4cf5ad432745937full;
constexpr size_t kBlock = 16;

GEARTRAIN_INLINE uint64_t mixed_low(uint64_t word) { return std::rotl(word * kFirst, 31) * kSecond; }
GEARTRAIN_INLINE uint64_t mixed_high(uint64_t word) { return std::rotl(word * kSecond, 33) * kFirst; }

GEARTRAIN_INLINE void add_block(Fingerprint& state, const char* block) {
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

// The last bytes, fewer than a block, and the number of all of them.
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

}  // namespace

Fingerprint murmur3(const void* bytes, size_t count, Fingerprint state) {
  const char* at = static_cast<const char*>(bytes);
  for (size_t block = 0; block < count / kBlock; ++block, at += kBlock) add_block(state, at);
  return ended(state, at, count);
}

Fingerprint fingerprint(const void* bytes, size_t count, Fingerprint begin) {
  const char* first = static_cast<const char*>(bytes);
  const size_t quarter = count / 4 / kBlock * kBlock;
  Fingerprint a = begin, b = begin, c = begin, d = begin;
  for (size_t at = 0; at < quarter; at += kBlock) {
    add_block(a, first + at);
    add_block(b, first + at + quarter);
    add_block(c, first + at + 2 * quarter);
    add_block(d, first + at + 3 * quarter);
  }
  const std::array<Fingerprint, 4> quarters = {ended(a, first, quarter), ended(b, first, quarter), ended(c, first, quarter),
                                               murmur3(first + 4 * quarter, count - 4 * quarter, d)};
  return murmur3(quarters.data(), sizeof quarters, begin);
}

}  // namespace geartrain
