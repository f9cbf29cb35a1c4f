// The first ids of a keyed permutation of [0, num_ids): a sample without replacement that needs no memory.
//
// An unbalanced Feistel network of 8 rounds over the smallest 2^bits >= num_ids (left half floor(bits / 2) bits),
// walked until the value falls below num_ids (Black, Rogaway: "Ciphers with arbitrary finite domains", CT-RSA 2002).
// Round function: the 32-bit finaliser of MurmurHash3 over half XOR key; key r = splitmix64(splitmix64(splitmix64(seed)
// XOR step) + r) >> 32, for r = 1 .. 8.
#pragma once

#include <cstdint>

namespace geartrain {

// out[i] = permutation(first + i), for i < count; needs first + count <= num_ids <= 2^62.
void sample_permutation(int64_t num_ids, int64_t first, int64_t count, uint64_t seed, uint64_t step, int64_t* out);

}  // namespace geartrain
