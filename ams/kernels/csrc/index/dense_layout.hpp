// Order of the positions of a dense table. It does not depend on which ids have rows, or on which buckets a shard owns
// today: when a bucket comes or goes, all other rows keep their positions.
//
// Ids equal in their last `range_bits` bits are a range of buckets. Positions go range by range, in each by id, and are
// cut into regions of equal length. The number of bits depends on the buckets at the table's creation: so many that
// nearly all of them fill ranges. A shard's ids in ascending order, of each range, are then neighbours in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/common.hpp"

namespace geartrain {

class DenseLayout {
 public:
  // `owned`: ascending buckets; 0 < num_rows < 2**62; a region has 2**region_bits positions.
  DenseLayout(const std::vector<int64_t>& owned, int64_t num_rows, int region_bits);

  int64_t position_of(int64_t id) const { return (id & range_mask_) << range_shift_ | id >> range_bits_; }
  int64_t id_at(int64_t position) const { return (position & place_mask()) << range_bits_ | position >> range_shift_; }
  int64_t region_of(int64_t position) const { return position >> region_bits_; }
  int64_t place_in_region(int64_t position) const { return position & (region_rows() - 1); }
  int64_t region_rows() const { return int64_t{1} << region_bits_; }
  // Number of ids of the table whose position is in a region.
  int64_t rows_of_region(int64_t region) const {
    const int64_t begin = region << region_bits_;
    return std::clamp<int64_t>(rows_of_range(begin >> range_shift_) - (begin & place_mask()), 0, region_rows());
  }
  int64_t num_ranges() const { return int64_t{1} << range_bits_; }
  // Number of ids of the table in a range of buckets; the first of them is the range's number.
  int64_t rows_of_range(int64_t range) const {
    return range < num_rows_ ? ((num_rows_ - 1 - range) >> range_bits_) + 1 : 0;
  }
  // Ids of the ranges at creation, each range rounded up to a multiple of `unit`.
  int64_t max_rows(int64_t unit) const { return num_ranges_ * ((rows_of_range(0) + unit - 1) / unit * unit); }

 private:
  int64_t place_mask() const { return (int64_t{1} << range_shift_) - 1; }

  int64_t num_rows_;
  int region_bits_;
  int range_bits_ = 0;
  int64_t range_mask_ = 0;
  int64_t num_ranges_ = 0;  // of the buckets at creation
  int range_shift_;
};

}  // namespace geartrain
