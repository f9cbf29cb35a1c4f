// Part of a row store: removes rows.
#include <algorithm>

#include "machine/lookahead.hpp"
#include "store/row_store.hpp"

namespace geartrain {

int64_t RowStore::remove(const int64_t* ids, int64_t count) {
  std::unique_lock lock(mutex_);
  return remove_rows(ids, count);
}

int64_t RowStore::remove_rows(const int64_t* ids, int64_t count) {
  require_legal(ids, count);
  std::vector<int64_t> positions(static_cast<size_t>(count));
  std::visit(
      [&](const auto& directory) {
        for (int64_t i = 0; i < count; ++i) {
          if (i + kBurst < count) directory.prefetch(ids[i + kBurst]);
          positions[static_cast<size_t>(i)] = directory.find(ids[i]);
        }
      },
      directory_);
  moments_.reserve_removals(
      count, [this] { return std::visit([](const auto& directory) { return directory.present(); }, directory_); });
  std::visit([&](auto& directory) { directory.reserve_erasures(positions); }, directory_);
  if (frozen_) copy_for_freeze(positions);
  // From here on nothing can fail.
  int64_t removed = 0;
  std::visit(
      [&](auto& directory) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t position = positions[static_cast<size_t>(i)];
          if (position < 0 || directory.find(ids[i]) < 0) continue;  // no row, or already removed by an earlier id
          moments_.note_removal(position, ids[i]);
          if (frozen_) frozen_->note_removal(position, ids[i], aside_bytes());
          directory.erase(ids[i]);
          ++removed;
        }
      },
      directory_);
  has_removed_ = has_removed_ || removed > 0;
  return removed;
}

int64_t RowStore::read_frozen_removed(int64_t from, int64_t most, int64_t* ids) const {
  std::shared_lock lock(mutex_);
  if (!frozen_) return 0;
  const std::vector<int64_t>& removed = frozen_->removed();
  const int64_t count = std::clamp<int64_t>(static_cast<int64_t>(removed.size()) - from, 0, most);
  std::copy_n(removed.data() + from, count, ids);
  return count;
}

}  // namespace geartrain
