// float16 and bfloat16 in plain integer and float operations, so that every instruction set rounds alike.
#pragma once

#include <bit>
#include <cstdint>

#include "machine/isa.hpp"

namespace geartrain {

GEARTRAIN_INLINE float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; NaN stays NaN.
GEARTRAIN_INLINE uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

GEARTRAIN_INLINE float from_float16(uint16_t half) {
  const uint32_t sign = (static_cast<uint32_t>(half) & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half) & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;   // exponent bias 15 -> 127
  const uint32_t special = (magnitude << 13) | 0x7F800000u;  // infinity, NaN
  // A subnormal is magnitude * 2^-24, the last place of 0.5: put it there and subtract 0.5 again, exactly.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude + 0x3F000000u) - 0.5f);
  const uint32_t bits = magnitude < 0x400u ? subnormal : magnitude >= 0x7C00u ? special : normal;
  return std::bit_cast<float>(bits | sign);
}

// Round to nearest even; too large becomes infinity, NaN stays NaN.
GEARTRAIN_INLINE uint16_t to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the addition of 0.5 rounds to multiples of 2^-24 by itself.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t half = magnitude >= 0x477FF000u ? special : magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(half | sign);
}

// Bits of the largest finite values, as float32.
inline constexpr int32_t kLargestFloat16 = 0x477FE000, kLargestBfloat16 = 0x7F7F0000;

// Stochastic rounding by 16 random bits: away from zero with a probability equal to the part cut off. A value that the
// type has stays. The magnitude must be less than the largest finite one.
GEARTRAIN_INLINE uint16_t round_small_bfloat16(float value, uint16_t draw) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + draw) >> 16);
}

GEARTRAIN_INLINE uint16_t round_small_float16(float value, uint16_t draw) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const bool is_subnormal = magnitude < 0x38800000u;
  const uint32_t normal = (magnitude - 0x38000000u + (draw >> 3)) >> 13;
  // In units of 2^-40: the 16 lowest bits are cut off.
  const float small = std::bit_cast<float>(is_subnormal ? magnitude : 0u) * 0x1p40f;
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(small) + draw) >> 16;
  return static_cast<uint16_t>((is_subnormal ? subnormal : normal) | sign);
}

// For any value: becomes infinite or NaN only if round to nearest makes it so.
GEARTRAIN_INLINE uint16_t round_bfloat16(float value, uint16_t draw) {
  const int32_t magnitude = std::bit_cast<int32_t>(value) & 0x7FFFFFFF;
  return magnitude < kLargestBfloat16 ? round_small_bfloat16(value, draw)
         : magnitude < 0x7F7F8000     ? static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16)
                                      : to_bfloat16(value);
}

GEARTRAIN_INLINE uint16_t round_float16(float value, uint16_t draw) {
  const int32_t magnitude = std::bit_cast<int32_t>(value) & 0x7FFFFFFF;
  return magnitude < kLargestFloat16 ? round_small_float16(value, draw) : to_float16(value);  // 65,504 or infinity, NaN
}

}  // namespace geartrain
