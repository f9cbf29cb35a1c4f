// Rows removed since a moment, of those that existed at the moment; rows that came and went since then are left out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "index/bits.hpp"

namespace geartrain {

class RemovedRows {
 public:
  RemovedRows() = default;
  // `there`: positions of the rows that existed at the moment.
  explicit RemovedRows(Bits there) : there_(std::move(there)) {}

  const std::vector<int64_t>& ids() const { return ids_; }
  int64_t memory_bytes() const {
    return static_cast<int64_t>(ids_.size() * sizeof(int64_t)) + (there_ ? there_->memory_bytes() : 0);
  }

  // Makes room for `count` rows. `present()` are the positions with a row: at the first removal since the moment they
  // are those of the moment. Throws std::bad_alloc, and then nothing has changed.
  template <class Present>
  void reserve(int64_t count, const Present& present) {
    const size_t needed = ids_.size() + static_cast<size_t>(count);
    if (needed > ids_.capacity()) ids_.reserve(std::max(needed, 2 * ids_.capacity()));
    if (!there_) there_ = present();
  }
  // Records the removal of the row of `id` at `position`; `reserve` must have been called.
  void note(int64_t position, int64_t id) {
    if (!there_->has(position)) return;
    there_->clear(position);
    ids_.push_back(id);
  }

 private:
  std::vector<int64_t> ids_;
  std::optional<Bits> there_;  // positions of rows that were there and have not been removed since
};

}  // namespace geartrain
