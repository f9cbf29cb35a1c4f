// Elementwise inner loops. One table of functions per instruction set; all give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/common.hpp"

namespace geartrain {

// Factors of a push.
struct PushFactors {
  float lr;
  float scale;
};

// 2 x 2 matrix of some steps without a gradient:  w' = ww w + wv v;  v' = vw w + vv v.
struct Elapsed {
  double ww, wv, vw, vv;
};

// Largest magnitudes of row and slot.
struct Ranges {
  double row, slot;
};

struct Kernels {
  // Applies steps without a gradient to a row and its slot. Sums in float64, kept within the ranges of the storage
  // types.
  void (*move)(float* row, float* slot, size_t count, const Elapsed& elapsed, Ranges ranges);
  // Applies them to the row alone.
  void (*move_row)(float* out, const float* row, const float* slot, size_t count, const Elapsed& elapsed,
                   Ranges ranges);
  // Adds another gradient of a step that was already applied:  d = gradient * scale;  v += d;  w -= lr * d. Returns the
  // largest magnitudes.
  Ranges (*add_late)(float* row, float* slot, const float* gradient, size_t count, PushFactors push);
  // Any storage type <-> float32, round to nearest even. Index: DType.
  void (*load[kNumDTypes])(float* out, const void* in, size_t count);
  void (*store[kNumDTypes])(void* out, const float* in, size_t count);
  // Bits of the largest |value| as float32 (widened for half types); >= kInfinityBits means NaN or infinity. Index:
  // DType.
  uint32_t (*max_abs_bits[kNumDTypes])(const void* in, size_t count);
  // Copies past the caches; `finish_streaming` must follow before another thread reads.
  void (*copy_streaming)(char* out, const char* in, size_t bytes);
  // out += in.
  void (*add)(float* out, const float* in, size_t count);
};

inline constexpr uint32_t kInfinityBits = 0x7F800000u;

const Kernels& kernels();
void finish_streaming();

}  // namespace geartrain
