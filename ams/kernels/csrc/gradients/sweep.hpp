// Inner loops over a gradient and its accumulated state. The same bits on every instruction set.
//
//   u = momentum * u + scale * g;   v = v + u,   with nesterov v = v + (scale * g + momentum * u)
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

struct Accumulation {
  float momentum, scale;
  bool nesterov;
};

// An element whose magnitude exceeds a limit: its magnitude bits above, its index within the tensor below.
using Survivor = uint64_t;
inline constexpr int kIndexBits = 32;
inline int32_t magnitude_of(Survivor survivor) { return static_cast<int32_t>(survivor >> kIndexBits); }
inline int32_t index_of(Survivor survivor) { return static_cast<int32_t>(survivor); }

struct SweepKernels {
  // Magnitude bits of the largest v that accumulate() would write. NaN and infinity in g, u or v show in it.
  int32_t (*largest)(const float* g, const float* u, const float* v, size_t count, const Accumulation& step);
  // Updates u and v, and writes the survivors among v, whose first element has index `first`, in order. Returns how
  // many; `out` has room for `count`.
  size_t (*accumulate)(const float* g, float* u, float* v, size_t count, const Accumulation& step, int32_t limit,
                       int64_t first, Survivor* out);
  // Collects without an update.
  size_t (*collect)(const float* v, size_t count, int32_t limit, int64_t first, Survivor* out);
};

const SweepKernels& sweep_kernels();

}  // namespace geartrain
