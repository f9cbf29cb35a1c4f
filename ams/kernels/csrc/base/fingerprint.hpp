// 128 bits that tell one sequence of bytes from another: MurmurHash3_x64_128 of Austin Appleby (public domain), begun from any
// 128 bits instead of a seed, so that what was hashed before can be the beginning of what comes next.
//
// Good against accidents, not against somebody who looks for two sequences with equal fingerprints. Its values are kept in
// memory only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

struct Fingerprint {
  uint64_t low = 0, high = 0;
  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

Fingerprint murmur3(const void* bytes, size_t count, Fingerprint begin = {});
// murmur3 of what NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC", CRYPTO 1999) makes of each KiB, twice, with keys of this
// process: as fast as memory. Two KiB that differ become equal with a probability of at most 2^-64.
Fingerprint fingerprint(const void* bytes, size_t count, Fingerprint begin = {});

}  // namespace geartrain
