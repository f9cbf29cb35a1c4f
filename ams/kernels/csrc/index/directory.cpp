#include "index/directory.hpp"

#include <utility>

namespace geartrain {

std::vector<int64_t> HashedDirectory::positions_for(const std::vector<int64_t>& ids, NewMemory& news) {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) positions[i] = index_.size() + static_cast<int64_t>(i);
  for (int64_t position : positions) ids_.ensure(position, &news);
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

DenseDirectory::DenseDirectory(const BucketRanks& ranks, std::vector<int64_t> owned, int64_t num_rows)
    : ranks_(ranks),
      owned_(std::move(owned)),
      num_owned_(static_cast<int64_t>(owned_.size())),
      num_rows_(num_rows),
      num_positions_(((num_rows - 1) / kNumBuckets + 1) * num_owned_) {}

std::vector<int64_t> DenseDirectory::positions_for(const std::vector<int64_t>& ids, NewMemory&) {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    positions[i] = position_of(ids[i]);
    present_.ensure(positions[i]);
  }
  return positions;
}

Placed DenseDirectory::insert(int64_t id) {
  const int64_t position = position_of(id);
  const bool created = !present_.has(position);
  present_.set(position);
  size_ += created;
  return {position, created};
}

}  // namespace geartrain
