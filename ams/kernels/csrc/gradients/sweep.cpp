#include "gradients/sweep.hpp"

#include <algorithm>
#include <bit>

#include "machine/isa.hpp"

namespace geartrain {
namespace {

// Elements whose largest magnitude is checked before the single ones: few of a thousand survive.
constexpr size_t kStride = 32;

GEARTRAIN_INLINE int32_t magnitude_bits(float value) { return std::bit_cast<int32_t>(value) & 0x7FFFFFFF; }

template <bool nesterov>
GEARTRAIN_INLINE float gathered(float g, float& u, float v, const Accumulation& step) {
  const float scaled = g * step.scale;
  u = u * step.momentum + scaled;
  return v + (nesterov ? u * step.momentum + scaled : u);
}

template <bool nesterov>
GEARTRAIN_INLINE int32_t largest_with(const float* __restrict g, const float* __restrict u, const float* __restrict v,
                                      size_t count, const Accumulation step) {
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    float velocity = u[i];
    const int32_t bits = magnitude_bits(gathered<nesterov>(g[i], velocity, v[i], step));
    largest = largest < bits ? bits : largest;
  }
  return largest;
}

GEARTRAIN_INLINE int32_t largest_body(const float* g, const float* u, const float* v, size_t count,
                                      const Accumulation& step) {
  return step.nesterov ? largest_with<true>(g, u, v, count, step) : largest_with<false>(g, u, v, count, step);
}

GEARTRAIN_INLINE int32_t largest_of_stride(const float* v, size_t count) {
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude_bits(v[i]);
    largest = largest < bits ? bits : largest;
  }
  return largest;
}

template <bool nesterov>
GEARTRAIN_INLINE int32_t update_stride(const float* __restrict g, float* __restrict u, float* __restrict v,
                                       size_t count, const Accumulation step) {
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    float velocity = u[i];
    const float value = gathered<nesterov>(g[i], velocity, v[i], step);
    u[i] = velocity;
    v[i] = value;
    const int32_t bits = magnitude_bits(value);
    largest = largest < bits ? bits : largest;
  }
  return largest;
}

GEARTRAIN_INLINE Survivor* take(const float* v, size_t count, int32_t limit, int64_t first, Survivor* next) {
  for (size_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude_bits(v[i]);
    *next = static_cast<Survivor>(bits) << kIndexBits | static_cast<Survivor>(first + static_cast<int64_t>(i));
    next += bits > limit;
  }
  return next;
}

template <bool nesterov>
GEARTRAIN_INLINE size_t accumulate_with(const float* g, float* u, float* v, size_t count, const Accumulation& step,
                                        int32_t limit, int64_t first, Survivor* out) {
  Survivor* next = out;
  size_t begin = 0;
  for (; begin + kStride <= count; begin += kStride)  // a constant count is unrolled
    if (update_stride<nesterov>(g + begin, u + begin, v + begin, kStride, step) > limit)
      next = take(v + begin, kStride, limit, first + static_cast<int64_t>(begin), next);
  update_stride<nesterov>(g + begin, u + begin, v + begin, count - begin, step);
  return static_cast<size_t>(take(v + begin, count - begin, limit, first + static_cast<int64_t>(begin), next) - out);
}

GEARTRAIN_INLINE size_t accumulate_body(const float* g, float* u, float* v, size_t count, const Accumulation& step,
                                        int32_t limit, int64_t first, Survivor* out) {
  return step.nesterov ? accumulate_with<true>(g, u, v, count, step, limit, first, out)
                       : accumulate_with<false>(g, u, v, count, step, limit, first, out);
}

GEARTRAIN_INLINE size_t collect_body(const float* v, size_t count, int32_t limit, int64_t first, Survivor* out) {
  Survivor* next = out;
  size_t begin = 0;
  for (; begin + kStride <= count; begin += kStride)
    if (largest_of_stride(v + begin, kStride) > limit)
      next = take(v + begin, kStride, limit, first + static_cast<int64_t>(begin), next);
  return static_cast<size_t>(take(v + begin, count - begin, limit, first + static_cast<int64_t>(begin), next) - out);
}

}  // namespace

const SweepKernels& sweep_kernels() {
  static const SweepKernels kernels = [] {
    const Isa isa = active_isa();
    return SweepKernels{.largest = Versions<&largest_body>::pick(isa),
                        .accumulate = Versions<&accumulate_body>::pick(isa),
                        .collect = Versions<&collect_body>::pick(isa)};
  }();
  return kernels;
}

}  // namespace geartrain
