#include "embedding/mapped_rows.hpp"

#include <algorithm>
#include <array>

#include "base/common.hpp"
#include "base/copy_row.hpp"

namespace geartrain {
namespace {

// Number of ids looked up in parallel: each step prefetches the memory of the next one, for all of them.
constexpr int64_t kTogether = 32;

}  // namespace

int64_t MappedRows::pull(const int64_t* wanted, int64_t num_wanted, char* out, size_t stride, int64_t* missing) const {
  int64_t num_missing = 0;
  std::array<uint64_t, kTogether> range;
  std::array<int64_t, kTogether> place;
  for (int64_t first = 0; first < num_wanted; first += kTogether) {
    const int64_t some = std::min(kTogether, num_wanted - first);
    for (int64_t i = 0; i < some; ++i) {
      const uint64_t hash = splitmix64(static_cast<uint64_t>(wanted[first + i]));
      range[i] = bits == 0 ? 0 : hash >> (64 - bits);
      __builtin_prefetch(starts + range[i]);
    }
    for (int64_t i = 0; i < some; ++i) {
      place[i] = std::clamp(starts[range[i]], int64_t{0}, count);
      __builtin_prefetch(ids + place[i]);
    }
    for (int64_t i = 0; i < some; ++i) {
      const int64_t end = std::clamp(starts[range[i] + 1], int64_t{0}, count);
      while (place[i] < end && ids[place[i]] != wanted[first + i]) ++place[i];
      if (place[i] >= end)
        place[i] = -1;
      else
        __builtin_prefetch(rows + static_cast<size_t>(place[i]) * row_bytes);
    }
    for (int64_t i = 0; i < some; ++i) {
      if (place[i] < 0)
        missing[num_missing++] = first + i;
      else
        copy_row(out + static_cast<size_t>(first + i) * stride, rows + static_cast<size_t>(place[i]) * row_bytes,
                 row_bytes);
    }
  }
  return num_missing;
}

}  // namespace geartrain
