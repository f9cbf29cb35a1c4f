// Where the rows of a dense table lie in the order of its positions. Nothing here depends on which ids have rows, or on which
// buckets a shard owns today: a bucket can come or go and no other row gets another position.
//
// Ids that are equal in their last `range_bits` bits are a range of buckets. Positions go range by range, in each by id, and are
// cut into regions of equal length. How many bits depends on the buckets at the table's creation: so many that nearly all of them fill
// ranges. Then a shard's ids in ascending order, of each range, are neighbours in memory.
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
  // How many ids of the table have their position in a region.
  int64_t rows_of_region(int64_t region) const {
    const int64_t begin = region << region_bits_;
    return std::clamp<int64_t>(rows_of_range(begin >> range_shift_) - (begin & place_mask()), 0, region_rows());
  }
  int64_t num_ranges() const { return int64_t{1} << range_bits_; }
  // How many ids of the table are in a range of buckets; the first of them is the range's number.
  int64_t rows_of_range(int64_t range) const { return range < num_rows_ ? ((num_rows_ - 1 - range) >> range_bits_) + 1 : 0; }
  // Of the ranges of the buckets at creation, the ids of each counted in multiples of `unit`.
  int64_t most_rows(int64_t unit) const { return num_ranges_ * ((rows_of_range(0) + unit - 1) / unit * unit); }

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
