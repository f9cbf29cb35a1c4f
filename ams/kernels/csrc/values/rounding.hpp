// Stochastic rounding of float32 to 16 bits: a value between two neighbours becomes one of them at random, so that its
// mean is preserved and steps too small for the storage type still count. (Round to nearest loses each of them.)
//
// The probability is a function of (seed, table, id, column, number of the row's update) alone, the same on every shard
// and rank, on every instruction set and in a replay: Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011; 7 rounds are the fewest that pass BigCrush) with
//   key = splitmix64(splitmix64(seed) ^ hash of the table's name),
//   counter = (id low, id high, number of the update mod 2^32, column / 8 + 2^16 * part);
// column % 8 belongs to the low half of word 0, its high half, the low half of word 1, ...
// tests/specification/rounding.py is the specification.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/common.hpp"

namespace geartrain {

// Rounded quantity. A second gradient of a step that has not ended has random bits of its own.
enum class Part : uint32_t { row = 0, slot = 1, late_row = 2, late_slot = 3 };

struct Draw {
  uint64_t key;
  int64_t id;
  int64_t number;  // of the row's update, or of the step that it is brought to
  Part part;
};

uint64_t rounding_key(uint64_t seed, uint32_t table_hash);

// in [count] -> out [count] of `dtype`; float32 is copied. A value that the type has stays; NaN and what rounds to
// infinity become what round to nearest makes of them, nothing else becomes infinite. Values of float16 below 2^-17 are
// first cut to multiples of 2^-40: a draw has 16 bits.
void store_rounded(DType dtype, void* out, const float* in, size_t count, const Draw& draw);

// `value` rounded to the nearest of the type.
float rounded_to_nearest(float value, DType dtype);

// Largest magnitude that `value` >= 0 may become.
float rounded_up(float value, DType dtype);

// One table for each instruction set (rounding_kernels.cpp). Index: DType, but float32.
struct RoundingKernels {
  void (*store[kNumDTypes])(uint16_t* out, const float* in, size_t count, const Draw& draw);
};

}  // namespace geartrain
