// Directory of a table: position of each id. Two kinds with one interface:
//   HashedDirectory  any id >= 0 in an owned bucket; positions in order of creation, those of removed rows again
//   DenseDirectory   ids below num_rows; positions by DenseLayout, a bit for "present", and items apart from positions
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "base/common.hpp"
#include "index/bits.hpp"
#include "index/dense_items.hpp"
#include "index/id_index.hpp"
#include "index/slabs.hpp"

namespace geartrain {

using BucketRanks = std::array<int16_t, kNumBuckets>;  // rank among the owned buckets, -1 where not owned

// Position of an id after an insertion, and whether it was absent before.
struct Placed {
  int64_t position;
  bool created;
};

class HashedDirectory {
 public:
  explicit HashedDirectory(const BucketRanks& ranks) : ranks_(ranks) {}

  std::optional<Reason> objection(int64_t id) const {
    if (id < 0) return Reason::negative_id;
    if (ranks_[static_cast<size_t>(hashed_bucket(id))] < 0) return Reason::foreign_bucket;
    return std::nullopt;
  }
  void prefetch(int64_t id) const { index_.prefetch(id); }
  int64_t find(int64_t id) const { return index_.find(id); }
  // Item of a row in memory: here equal to the position.
  int64_t find_item(int64_t id) const { return index_.find(id); }
  int64_t size() const { return index_.size(); }
  int64_t memory_bytes() const { return index_.memory_bytes(); }
  // Positions with memory: 0 up to this number.
  int64_t end() const { return index_.end(); }
  Bits present() const;
  // Lowest position >= `from` with a row, or -1.
  int64_t next_present(int64_t from) const {
    while (from < end() && vacant_.has(from)) ++from;
    return from < end() ? from : -1;
  }
  int64_t id_at(int64_t position) const { return index_.id_at(position); }
  static int64_t bucket_of(int64_t id) { return hashed_bucket(id); }

  // Positions that `ids` (absent; repeats allowed) may get. Throws std::bad_alloc, and then nothing has changed.
  std::vector<int64_t> positions_for(const std::vector<int64_t>& ids) const;
  // Makes `count` insertions with those positions possible. Throws the same.
  void reserve(int64_t count, NewMemory& news) { index_.reserve(count, &news); }
  // Gives `id` a position if it has none; both calls above must have been made for it.
  Placed insert(int64_t id);

  // Makes erasures of the rows at these positions (-1: none) possible. Throws std::bad_alloc, and then nothing has
  // changed.
  void reserve_erasures(const std::vector<int64_t>& positions);
  // Erases the row of an id. Its position keeps the id until another row has it.
  void erase(int64_t id);

 private:
  BucketRanks ranks_;
  IdIndex index_;
  Bits vacant_;  // positions without a row
};

class DenseDirectory {
 public:
  DenseDirectory(const BucketRanks& ranks, const std::vector<int64_t>& owned, int64_t num_rows, int64_t item_bytes);

  std::optional<Reason> objection(int64_t id) const {
    if (id < 0) return Reason::negative_id;
    if (id >= num_rows_) return Reason::id_too_large;
    if (ranks_[static_cast<size_t>(dense_bucket(id))] < 0) return Reason::foreign_bucket;
    return std::nullopt;
  }
  void prefetch(int64_t id) const { items_.prefetch(items_.layout().position_of(id)); }
  int64_t find(int64_t id) const {
    const int64_t position = items_.layout().position_of(id);
    return items_.is_full(position) || present_.has(position) ? position : -1;
  }
  int64_t find_item(int64_t id) const {
    const int64_t position = items_.layout().position_of(id), item = items_.at_if_full(position);
    if (item >= 0) [[likely]]
      return item;
    return present_.has(position) ? items_.at(position) : -1;
  }
  int64_t size() const { return size_; }
  int64_t memory_bytes() const { return present_.memory_bytes() + items_.memory_bytes(); }
  Bits present() const { return present_.copy(); }
  int64_t next_present(int64_t from) const { return present_.next(from); }
  int64_t id_at(int64_t position) const { return items_.layout().id_at(position); }
  static int64_t bucket_of(int64_t id) { return dense_bucket(id); }
  DenseItems& items() { return items_; }
  const DenseItems& items() const { return items_; }

  std::vector<int64_t> positions_for(const std::vector<int64_t>& ids);
  void reserve(int64_t, NewMemory&) {}
  Placed insert(int64_t id);

  void reserve_erasures(const std::vector<int64_t>&) {}
  void erase(int64_t id);

 private:
  BucketRanks ranks_;
  int64_t num_rows_;
  int64_t size_ = 0;
  Bits present_;
  DenseItems items_;
};

using Directory = std::variant<HashedDirectory, DenseDirectory>;

}  // namespace geartrain
