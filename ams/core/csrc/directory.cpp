#include "directory.hpp"

namespace geartrain {

std::vector<int64_t> HashedDirectory::reserve(const std::vector<int64_t>& ids) {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) positions[i] = index_.size() + static_cast<int64_t>(i);
  index_.reserve(static_cast<int64_t>(ids.size()));
  return positions;
}

Placed HashedDirectory::insert(int64_t id) {
  const int64_t found = index_.find(id);
  if (found >= 0) return {found, false};
  const int64_t position = index_.size();
  index_.insert(id, position);
  return {position, true};
}

DenseDirectory::DenseDirectory(const BucketRanks& ranks, int64_t num_owned, int64_t num_rows)
    : ranks_(ranks),
      num_owned_(num_owned),
      num_rows_(num_rows),
      num_positions_(((num_rows - 1) / kNumBuckets + 1) * num_owned),
      present_(sizeof(uint64_t), (num_positions_ + 63) / 64) {}

std::vector<int64_t> DenseDirectory::reserve(const std::vector<int64_t>& ids) {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    positions[i] = position_of(ids[i]);
    present_.ensure(positions[i] / 64);
  }
  return positions;
}

Placed DenseDirectory::insert(int64_t id) {
  const int64_t position = position_of(id);
  const uint64_t bit = uint64_t{1} << (position % 64);
  const bool created = (*word(position) & bit) == 0;
  *word(position) |= bit;
  size_ += created;
  return {position, created};
}

}  // namespace geartrain
