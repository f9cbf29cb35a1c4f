#include "index/directory.hpp"

namespace geartrain {

std::vector<int64_t> HashedDirectory::positions_for(const std::vector<int64_t>& ids) const {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) positions[i] = index_.next_number(static_cast<int64_t>(i));
  return positions;
}

Bits HashedDirectory::present() const {
  Bits bits = Bits::first(end());
  bits.subtract(vacant_);
  return bits;
}

Placed HashedDirectory::insert(int64_t id) {
  const int64_t found = index_.find(id);
  if (found >= 0) return {found, false};
  const int64_t position = index_.insert(id);
  if (vacant_.memory_bytes() > 0 && vacant_.has(position)) vacant_.clear(position);
  return {position, true};
}

void HashedDirectory::reserve_erasures(const std::vector<int64_t>& positions) {
  index_.reserve_releases(static_cast<int64_t>(positions.size()));
  for (int64_t position : positions)
    if (position >= 0) vacant_.ensure(position);
}

void HashedDirectory::erase(int64_t id) {
  const int64_t position = index_.erase(id);
  vacant_.set(position);
  index_.release(position);
}

DenseDirectory::DenseDirectory(const BucketRanks& ranks, const std::vector<int64_t>& owned, int64_t num_rows,
                               int64_t item_bytes)
    : ranks_(ranks), num_rows_(num_rows), items_(owned, num_rows, item_bytes) {}

std::vector<int64_t> DenseDirectory::positions_for(const std::vector<int64_t>& ids) {
  std::vector<int64_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    positions[i] = items_.layout().position_of(ids[i]);
    present_.ensure(positions[i]);
  }
  return positions;
}

Placed DenseDirectory::insert(int64_t id) {
  const int64_t position = items_.layout().position_of(id);
  const bool created = !present_.has(position);
  if (created) {
    present_.set(position);
    items_.created(position);
    ++size_;
  }
  return {position, created};
}

void DenseDirectory::erase(int64_t id) {
  const int64_t position = items_.layout().position_of(id);
  present_.clear(position);
  items_.removed(position);
  --size_;
}

}  // namespace geartrain
