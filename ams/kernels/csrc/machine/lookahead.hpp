// Prefetch of rows some time before their use. The fastest way depends on the CPU (docs/decisions/0026); results do
// not.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/common.hpp"

namespace geartrain {

enum class LookaheadWay : int {
  bursts = 0,  // the rows of a burst together, into the second-level cache, then they are used
  window = 1,  // each row when the one 2 KiB before it is used, into the first level
};

// Purpose of a prefetch.
enum class Use { read, update };

// Way in use: this CPU's, or GEARTRAIN_LOOKAHEAD=bursts|window, read once. Throws std::runtime_error if the variable
// names neither.
LookaheadWay active_lookahead(Use use);
const char* lookahead_name(LookaheadWay way);

// On Zen 4 a burst of 24 rows of 512 bytes was a quarter faster than a window, and one of 12 is 6 % faster still where
// each row has a slot.
inline constexpr int64_t kBurst = 12;

// The fastest for rows of 64, 512 and 2,048 bytes on Sapphire Rapids.
inline constexpr size_t kWindowBytes = 2048;
inline constexpr int64_t kMaxInWindow = 32;

// Most rows that are prefetched and not used yet, including the present one.
inline constexpr int64_t kMaxAhead = 64;
static_assert(kBurst <= kMaxAhead && kMaxInWindow < kMaxAhead);

// Most prefetched bytes of a row: the CPU fetches the rest of a long one by itself, and in a burst whole rows of 4 KiB
// with their slots evicted one another (a tenth of an Adam push, on Zen 3).
inline constexpr size_t kMaxAsked = 2048;

class Lookahead {
 public:
  explicit Lookahead(Use use) : use_(use), way_(active_lookahead(use)) {}
  Use use() const { return use_; }

  void ask(const void* row, size_t bytes) const {
    bytes = std::min(bytes, kMaxAsked);
    if (way_ == LookaheadWay::bursts) return prefetch_bytes(row, bytes);
    const char* begin = static_cast<const char*>(row);
    for (size_t offset = 0; offset < bytes; offset += 64) {
#if defined(__x86_64__)
      // Not __builtin_prefetch: see prefetch_bytes.
      if (use_ == Use::read)
        asm volatile("prefetchnta %0" : : "m"(begin[offset]));
      else
        asm volatile("prefetchw %0" : : "m"(begin[offset]));
#else
      use_ == Use::read ? __builtin_prefetch(begin + offset, 0, 0) : __builtin_prefetch(begin + offset, 1, 3);
      asm volatile("" : : "r"(begin));  // else GCC drops calls of a function that only prefetches
#endif
    }
  }

  // Calls visit(i) for i = 0 .. count-1 in order, each some time after ahead(i), which prefetches about `bytes`.
  template <class Ahead, class Visit>
  void each(int64_t count, size_t bytes, Ahead&& ahead, Visit&& visit) const {
    if (way_ == LookaheadWay::bursts) {
      for (int64_t begin = 0; begin < count; begin += kBurst) {
        const int64_t end = std::min(count, begin + kBurst);
        for (int64_t i = begin; i < end; ++i) ahead(i);
        for (int64_t i = begin; i < end; ++i) visit(i);
      }
      return;
    }
    const int64_t window =
        std::clamp<int64_t>(static_cast<int64_t>(kWindowBytes / std::max<size_t>(bytes, 1)), 1, kMaxInWindow);
    for (int64_t i = 0; i < std::min(count, window); ++i) ahead(i);
    for (int64_t i = 0; i < count; ++i) {
      if (i + window < count) ahead(i + window);
      visit(i);
    }
  }

 private:
  Use use_;
  LookaheadWay way_;
};

}  // namespace geartrain
