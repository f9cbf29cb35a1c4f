// 128-bit fingerprint of bytes: MurmurHash3_x64_128 of Austin Appleby (public domain), with a 128-bit start value
// instead of a seed, so that a fingerprint can be continued.
//
// Good against accidents, not against an attacker who looks for two sequences with equal fingerprints. Values are kept
// in memory only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

struct Fingerprint {
  uint64_t low = 0, high = 0;
  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

Fingerprint murmur3(const void* bytes, size_t count, Fingerprint begin = {});
// murmur3 of the NH hash (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC", CRYPTO 1999) of each KiB, twice, with keys
// of this process: as fast as memory. Two different KiB collide with a probability of at most 2^-64.
Fingerprint fingerprint(const void* bytes, size_t count, Fingerprint begin = {});

}  // namespace geartrain
