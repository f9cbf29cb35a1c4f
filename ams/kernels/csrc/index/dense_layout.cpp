#include "index/dense_layout.hpp"

#include <array>
#include <bit>

namespace geartrain {
namespace {

// One of eight owned buckets may be in a range that is cut by the border to another shard.
constexpr int64_t kBorderShare = 8;

}  // namespace

DenseLayout::DenseLayout(const std::vector<int64_t>& owned, int64_t num_rows, int region_bits)
    : num_rows_(num_rows), region_bits_(region_bits) {
  std::array<int64_t, kNumBuckets> owned_of_range;
  for (;; ++range_bits_) {
    range_mask_ = (int64_t{1} << range_bits_) - 1;
    owned_of_range.fill(0);
    for (int64_t bucket : owned) ++owned_of_range[static_cast<size_t>(bucket & range_mask_)];
    int64_t at_borders = 0;
    for (int64_t count : owned_of_range) at_borders += count < kNumBuckets >> range_bits_ ? count : 0;
    if (at_borders * kBorderShare <= static_cast<int64_t>(owned.size())) break;
  }
  num_ranges_ = std::ranges::count_if(owned_of_range, [](int64_t count) { return count > 0; });
  range_shift_ = std::max(region_bits, static_cast<int>(std::bit_width(static_cast<uint64_t>(rows_of_range(0) - 1))));
}

}  // namespace geartrain
