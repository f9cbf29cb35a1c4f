#include "directory.hpp"

#include <utility>

namespace geartrain {

std::vector<int64_t> HashedDirectory::reserve(const std::vector<int64_t>& ids) {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) positions[i] = index_.size() + static_cast<int64_t>(i);
  for (int64_t position : positions) ids_.ensure(position);
  index_.reserve(static_cast<int64_t>(ids.size()));
  return positions;
}

Placed HashedDirectory::insert(int64_t id) {
  const int64_t found = index_.find(id);
  if (found >= 0) return {found, false};
  const int64_t position = index_.size();
  index_.insert(id, position);
  *reinterpret_cast<int64_t*>(ids_.at(position)) = id;
  return {position, true};
}

std::vector<uint64_t> HashedDirectory::present_bits() const {
  std::vector<uint64_t> bits(static_cast<size_t>((size() + 63) / 64), ~uint64_t{0});
  if (size() % 64 != 0) bits.back() = (uint64_t{1} << (size() % 64)) - 1;
  return bits;
}

DenseDirectory::DenseDirectory(const BucketRanks& ranks, std::vector<int64_t> owned, int64_t num_rows)
    : ranks_(ranks),
      owned_(std::move(owned)),
      num_owned_(static_cast<int64_t>(owned_.size())),
      num_rows_(num_rows),
      num_positions_(((num_rows - 1) / kNumBuckets + 1) * num_owned_),
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

std::vector<uint64_t> DenseDirectory::present_bits() const {
  std::vector<uint64_t> bits(static_cast<size_t>((num_positions_ + 63) / 64));
  for (size_t i = 0; i < bits.size(); ++i)
    if (present_.has(static_cast<int64_t>(i))) bits[i] = *reinterpret_cast<const uint64_t*>(present_.at(static_cast<int64_t>(i)));
  return bits;
}

}  // namespace geartrain
