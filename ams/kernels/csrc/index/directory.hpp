// Which position a table's id has, if it has one. Two kinds with one face:
//   HashedDirectory  any id >= 0 in an owned bucket; positions in order of creation
//   DenseDirectory   ids below num_rows; position = id / 4096 * owned buckets + rank of the bucket, and a bit for "present"
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "index/bits.hpp"
#include "base/common.hpp"
#include "index/id_index.hpp"
#include "index/slabs.hpp"

namespace geartrain {

using BucketRanks = std::array<int16_t, kNumBuckets>;  // rank among the owned buckets, -1 where not owned

// Where an id is after an insertion, and whether it was absent before.
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
  int64_t size() const { return index_.size(); }
  int64_t memory_bytes() const { return index_.memory_bytes() + index_.size() * static_cast<int64_t>(sizeof(int64_t)); }
  Bits present() const { return Bits::first(size()); }
  // The lowest position >= `from` that has a row, or -1.
  int64_t next_present(int64_t from) const { return from < size() ? from : -1; }
  int64_t id_at(int64_t position) const { return *reinterpret_cast<const int64_t*>(ids_.at(position)); }
  int64_t bucket_at(int64_t position) const { return hashed_bucket(id_at(position)); }

  // The positions that `ids` (absent; repeats allowed) may be given. Throws std::bad_alloc, and then nothing has changed.
  std::vector<int64_t> positions_for(const std::vector<int64_t>& ids, NewMemory& news);
  // Makes sure that `count` ids can be inserted that have those positions. Throws the same.
  void reserve(int64_t count) { index_.reserve(count); }
  // Gives `id` a position if it has none; both calls above must have been made for it.
  Placed insert(int64_t id);

 private:
  BucketRanks ranks_;
  IdIndex index_;
  SlabArray ids_{sizeof(int64_t), INT64_MAX};  // by position
};

class DenseDirectory {
 public:
  DenseDirectory(const BucketRanks& ranks, std::vector<int64_t> owned, int64_t num_rows);

  std::optional<Reason> objection(int64_t id) const {
    if (id < 0) return Reason::negative_id;
    if (id >= num_rows_) return Reason::id_too_large;
    if (ranks_[static_cast<size_t>(dense_bucket(id))] < 0) return Reason::foreign_bucket;
    return std::nullopt;
  }
  void prefetch(int64_t id) const { present_.prefetch(position_of(id)); }
  int64_t find(int64_t id) const {
    const int64_t position = position_of(id);
    return present_.has(position) ? position : -1;
  }
  int64_t size() const { return size_; }
  int64_t memory_bytes() const { return present_.memory_bytes(); }
  int64_t num_positions() const { return num_positions_; }
  Bits present() const { return present_.copy(); }
  int64_t next_present(int64_t from) const { return present_.next(from); }
  int64_t id_at(int64_t position) const {
    return position / num_owned_ << kBucketBits | bucket_at(position);
  }
  int64_t bucket_at(int64_t position) const { return owned_[static_cast<size_t>(position % num_owned_)]; }

  std::vector<int64_t> positions_for(const std::vector<int64_t>& ids, NewMemory& news);
  void reserve(int64_t) {}
  Placed insert(int64_t id);

 private:
  int64_t position_of(int64_t id) const {
    return (id >> kBucketBits) * num_owned_ + ranks_[static_cast<size_t>(dense_bucket(id))];
  }

  BucketRanks ranks_;
  std::vector<int64_t> owned_;
  int64_t num_owned_;
  int64_t num_rows_;
  int64_t num_positions_;
  int64_t size_ = 0;
  Bits present_;
};

using Directory = std::variant<HashedDirectory, DenseDirectory>;

}  // namespace geartrain
