// Largest magnitude in a loop. Magnitudes of IEEE numbers order like their bits, with NaN above infinity: an integer
// maximum is fast and finds both.
#pragma once

#include <bit>
#include <cstdint>

#include "machine/isa.hpp"

namespace geartrain {

struct Largest {
  int32_t bits = 0;

  GEARTRAIN_INLINE void see(float value) {
    const int32_t magnitude = std::bit_cast<int32_t>(value) & 0x7FFFFFFF;
    bits = bits < magnitude ? magnitude : bits;
  }
  float value() const { return std::bit_cast<float>(bits); }
};

}  // namespace geartrain
