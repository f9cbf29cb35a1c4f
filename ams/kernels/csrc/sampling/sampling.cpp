#include "sampling/sampling.hpp"

#include <algorithm>
#include <bit>

#include "base/common.hpp"
#include "machine/isa.hpp"

namespace geartrain {
namespace {

constexpr int kRounds = 8;
constexpr int64_t kBlock = 256;

struct Network {
  uint32_t keys[kRounds];
  int left_bits;
  int right_bits;
};

Network network_for(int64_t num_ids, uint64_t seed, uint64_t step) {
  Network network;
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(num_ids - 1)));
  network.left_bits = bits / 2;
  network.right_bits = bits - bits / 2;
  const uint64_t base = splitmix64(splitmix64(seed) ^ step);
  for (int round = 0; round < kRounds; ++round)
    network.keys[round] = static_cast<uint32_t>(splitmix64(base + static_cast<uint64_t>(round) + 1) >> 32);
  return network;
}

GEARTRAIN_INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// One pass of the network over values in place; halves have at most 31 bits.
GEARTRAIN_INLINE void permute_body(uint64_t* values, int64_t count, const Network& network) {
  uint32_t left[kBlock], right[kBlock];
  const uint32_t left_mask = (uint32_t{1} << network.left_bits) - 1,
                 right_mask = (uint32_t{1} << network.right_bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    left[i] = static_cast<uint32_t>(values[i] >> network.right_bits);
    right[i] = static_cast<uint32_t>(values[i]) & right_mask;
  }
  for (int round = 0; round < kRounds; round += 2) {
    const uint32_t key0 = network.keys[round], key1 = network.keys[round + 1];
    for (int64_t i = 0; i < count; ++i) {
      left[i] ^= mix(right[i] ^ key0) & left_mask;
      right[i] ^= mix(left[i] ^ key1) & right_mask;
    }
  }
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<uint64_t>(left[i]) << network.right_bits | right[i];
}

}  // namespace

void sample_permutation(int64_t num_ids, int64_t first, int64_t count, uint64_t seed, uint64_t step, int64_t* out) {
  const Network network = network_for(num_ids, seed, step);
  const auto permute = Versions<&permute_body>::pick(active_isa());
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    uint64_t values[kBlock];
    int64_t where[kBlock];
    int64_t pending = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < pending; ++i) {
      values[i] = static_cast<uint64_t>(first + begin + i);
      where[i] = begin + i;
    }
    while (pending > 0) {
      permute(values, pending, network);
      int64_t outside = 0;
      for (int64_t i = 0; i < pending; ++i) {
        out[where[i]] = static_cast<int64_t>(values[i]);
        values[outside] = values[i];
        where[outside] = where[i];
        outside += out[where[i]] >= num_ids;
      }
      pending = outside;
    }
  }
}

}  // namespace geartrain
