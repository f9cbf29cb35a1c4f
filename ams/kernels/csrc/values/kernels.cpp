#include "values/kernels.hpp"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "machine/isa.hpp"
#include "values/half.hpp"
#include "values/largest.hpp"

namespace geartrain {
namespace {

template <DType dtype>
GEARTRAIN_INLINE float widen(uint16_t bits) {
  if constexpr (dtype == DType::float16) return from_float16(bits);
  return from_bfloat16(bits);
}

template <DType dtype>
GEARTRAIN_INLINE uint16_t narrow(float value) {
  if constexpr (dtype == DType::float16) return to_float16(value);
  return to_bfloat16(value);
}

template <DType dtype>
GEARTRAIN_INLINE void load_body(float* __restrict out, const void* in, size_t count) {
  if constexpr (dtype == DType::float32) {
    if (count != 0) std::memcpy(out, in, count * sizeof(float));  // pointers may be null if count is 0
  } else {
    const uint16_t* __restrict bits = static_cast<const uint16_t*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = widen<dtype>(bits[i]);
  }
}

template <DType dtype>
GEARTRAIN_INLINE void store_body(void* out, const float* __restrict in, size_t count) {
  if constexpr (dtype == DType::float32) {
    if (count != 0) std::memcpy(out, in, count * sizeof(float));  // pointers may be null if count is 0
  } else {
    uint16_t* __restrict bits = static_cast<uint16_t*>(out);
    for (size_t i = 0; i < count; ++i) bits[i] = narrow<dtype>(in[i]);
  }
}

// Magnitudes of IEEE numbers order like their bits, and NaN above infinity: one integer maximum finds both.
template <DType dtype>
GEARTRAIN_INLINE uint32_t max_abs_bits_body(const void* in, size_t count) {
  if constexpr (dtype == DType::float32) {
    const int32_t* bits = static_cast<const int32_t*>(in);
    int32_t largest = 0;
    for (size_t i = 0; i < count; ++i) {
      const int32_t magnitude = bits[i] & 0x7FFFFFFF;
      largest = largest < magnitude ? magnitude : largest;
    }
    return static_cast<uint32_t>(largest);
  } else {
    const uint16_t* bits = static_cast<const uint16_t*>(in);
    int16_t largest = 0;
    for (size_t i = 0; i < count; ++i) {
      const int16_t magnitude = static_cast<int16_t>(bits[i] & 0x7FFF);
      largest = largest < magnitude ? magnitude : largest;
    }
    return std::bit_cast<uint32_t>(widen<dtype>(static_cast<uint16_t>(largest)));
  }
}

GEARTRAIN_INLINE void add_body(float* __restrict out, const float* __restrict in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] += in[i];
}

GEARTRAIN_INLINE Ranges add_late_body(float* __restrict row, float* __restrict slot, const float* __restrict gradient,
                                      size_t count, PushFactors push) {
  Largest largest_row, largest_slot;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * push.scale;
    const float velocity = slot[i] + direction, weight = row[i] - push.lr * direction;
    slot[i] = velocity;
    row[i] = weight;
    largest_slot.see(velocity);
    largest_row.see(weight);
  }
  return {largest_row.value(), largest_slot.value()};
}

GEARTRAIN_INLINE float moved(double w, double v, double by_w, double by_v, double range) {
  double value = by_w * w + by_v * v;
  value = value < range ? value : range;
  value = value > -range ? value : -range;
  return static_cast<float>(value);
}

GEARTRAIN_INLINE void move_body(float* __restrict row, float* __restrict slot, size_t count, const Elapsed& elapsed,
                                Ranges ranges) {
  const Elapsed e = elapsed;
  for (size_t i = 0; i < count; ++i) {
    const double w = row[i], v = slot[i];
    row[i] = moved(w, v, e.ww, e.wv, ranges.row);
    slot[i] = moved(w, v, e.vw, e.vv, ranges.slot);
  }
}

GEARTRAIN_INLINE void move_row_body(float* __restrict out, const float* __restrict row, const float* __restrict slot,
                                    size_t count, const Elapsed& elapsed, Ranges ranges) {
  const Elapsed e = elapsed;
  for (size_t i = 0; i < count; ++i) out[i] = moved(row[i], slot[i], e.ww, e.wv, ranges.row);
}

void copy_plain(char* out, const char* in, size_t bytes) { std::memcpy(out, in, bytes); }

#if defined(__x86_64__)
// 16-byte stores alone were slower than memcpy: they only bring `out` to the next multiple of 32 and end the row.
GEARTRAIN_TARGET_AVX2 void copy_streaming_avx2(char* out, const char* in, size_t bytes) {
  if ((reinterpret_cast<uintptr_t>(out) | bytes) % 16 != 0) return copy_plain(out, in, bytes);
  size_t at = 0;
  const auto copy_16 = [&]() GEARTRAIN_TARGET_AVX2 {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at)));
    at += 16;
  };
  if (reinterpret_cast<uintptr_t>(out) % 32 != 0 && bytes != 0) copy_16();
  for (; at + 32 <= bytes; at += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at)));
  if (at < bytes) copy_16();
}
#else
constexpr auto* copy_streaming_avx2 = &copy_plain;
#endif

constexpr DType kF32 = DType::float32, kF16 = DType::float16, kBF16 = DType::bfloat16;

constexpr Kernels kernels_for(Isa isa) {
  return Kernels{
      .move = Versions<&move_body>::pick(isa),
      .move_row = Versions<&move_row_body>::pick(isa),
      .add_late = Versions<&add_late_body>::pick(isa),
      .load = {Versions<&load_body<kF32>>::pick(isa), Versions<&load_body<kF16>>::pick(isa),
               Versions<&load_body<kBF16>>::pick(isa)},
      .store = {Versions<&store_body<kF32>>::pick(isa), Versions<&store_body<kF16>>::pick(isa),
                Versions<&store_body<kBF16>>::pick(isa)},
      .max_abs_bits = {Versions<&max_abs_bits_body<kF32>>::pick(isa), Versions<&max_abs_bits_body<kF16>>::pick(isa),
                       Versions<&max_abs_bits_body<kBF16>>::pick(isa)},
      .copy_streaming = isa == Isa::baseline ? &copy_plain : copy_streaming_avx2,
      .add = Versions<&add_body>::pick(isa),
  };
}

constexpr Kernels kTables[] = {kernels_for(Isa::baseline), kernels_for(Isa::avx2), kernels_for(Isa::avx512)};

}  // namespace

void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

const Kernels& kernels() { return kTables[static_cast<int>(active_isa())]; }

}  // namespace geartrain
