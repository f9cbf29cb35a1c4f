// Shared by all kernels: storage types, hashing, and reasons of a refusal.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace geartrain {

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2 };

inline constexpr int kNumDTypes = 3;
inline constexpr int kBucketBits = 12;
inline constexpr int64_t kNumBuckets = int64_t{1} << kBucketBits;

inline constexpr size_t item_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

inline constexpr double largest_of(DType dtype) {
  return dtype == DType::float32 ? 0x1.fffffep127 : dtype == DType::float16 ? 65504.0 : 0x1.fep127;
}

// Finaliser of Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (OOPSLA 2014).
inline constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline constexpr int64_t hashed_bucket(int64_t id) {
  return static_cast<int64_t>(splitmix64(static_cast<uint64_t>(id)) >> (64 - kBucketBits));
}
inline constexpr int64_t dense_bucket(int64_t id) { return id & (kNumBuckets - 1); }

// Reason why a request changed nothing. Python words the message; `index` is the first offending place in the request.
enum class Reason : int {
  negative_id = 0,
  id_too_large = 1,
  foreign_bucket = 2,
  non_finite = 3,
  overflow = 4,
  bad_position = 5,
  beyond_wire = 6
};

struct Refusal {
  Reason reason;
  int64_t index;
};

// Into the second-level cache: with 512-byte rows that was a third faster than into the first level, whose few miss
// buffers stall the prefetches themselves; non-temporal stores of the results were slower than plain ones (Zen 4).
inline void prefetch_bytes(const void* address, size_t bytes) {
  const char* begin = static_cast<const char*>(address);
  for (size_t offset = 0; offset < bytes; offset += 64) {
#if defined(__x86_64__)
    // Not __builtin_prefetch: GCC drops calls of a function that only prefetches, as one without effect.
    asm volatile("prefetcht1 %0" : : "m"(begin[offset]));
#else
    __builtin_prefetch(begin + offset, 0, 2);
    asm volatile("" : : "r"(begin));
#endif
  }
}

// Resets this thread's rounding and denormal modes, which other libraries may change, so that bits do not depend on
// them.
class DefaultFloatMode {
#if defined(__x86_64__)
 public:
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}
#endif
 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

// Flushes numbers below 1e-38 to 0 meanwhile: on some CPUs each of them costs a hundred ordinary operations.
class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x9FC0); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
 public:
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

}  // namespace geartrain
