// Rows of a table as they were at one moment, while writes go on (copy on write).
//
// A row is copied before its first write since that moment; all others are read in place. So the moment itself costs
// about a bit per row, a push pays for the rows it touches, and nothing stalls for long.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "base/common.hpp"
#include "index/bits.hpp"
#include "index/id_index.hpp"
#include "index/slabs.hpp"
#include "moments/removed_rows.hpp"

namespace geartrain {

// Items are a row, its slot, the number of its last step and its life, as far as the table has those. A copied item is
// followed by its id if its row was removed since: the position may be another row's by then.
class FrozenRows {
 public:
  // `members`: positions of the moment; `room`: memory for copied items, with any content.
  FrozenRows(Bits members, SlabArray room)
      : members_(std::move(members)),
        in_place_(members_.copy()),
        num_members_(members_.count()),
        only_in_place_(num_members_),
        copies_(std::move(room)) {}

  int64_t num_members() const { return num_members_; }
  // Ids of rows that were removed before the moment and belong to an incremental snapshot; filled by the table.
  std::vector<int64_t>& removed() { return removed_; }
  const std::vector<int64_t>& removed() const { return removed_; }
  // Returns the used memory for the next moment: fresh pages would cost a push more than the copies. Bounded, so that a
  // moment at which every row was written does not hold as much for good.
  SlabArray take_room() {
    copies_.keep(aside_.size(), kMaxKeptBytes);
    return std::move(copies_);
  }
  bool is_only_in_place(int64_t position) const { return in_place_.has(position); }

  // Number of members that are only in place, and may still have to be copied.
  int64_t only_in_place() const { return only_in_place_; }

  int64_t num_aside() const { return aside_.size(); }
  // Bytes of the index of copied items.
  int64_t index_bytes() const { return aside_.memory_bytes(); }

  // Makes room for `count` copies. Throws std::bad_alloc, and then nothing has changed.
  void reserve(int64_t count) {
    aside_.reserve(count);
    for (int64_t place = aside_.size(); place < aside_.size() + count; ++place) copies_.ensure(place);
  }
  // Copies the item of a position before it is overwritten; `reserve` must have been called.
  void copy_for_freeze(int64_t position, std::initializer_list<std::span<const char>> item) {
    const int64_t place = aside_.insert(position);
    char* copy = copies_.at(place);
    for (const auto part : item) {
      if (!part.empty()) std::memcpy(copy, part.data(), part.size());
      copy += part.size();
    }
    const int64_t none = -1;
    std::memcpy(copy, &none, sizeof(none));
    leave_place(position);
  }
  // Copied item of a position, or null.
  const char* aside(int64_t position) const {
    const int64_t place = aside_.find(position);
    return place < 0 ? nullptr : copies_.at(place);
  }
  // Records the removal of the row of `id` at a position; if a freeze needs it, it was copied.
  void note_removal(int64_t position, int64_t id, size_t item_bytes) {
    const int64_t place = aside_.find(position);
    if (place >= 0 && id_aside(copies_.at(place), item_bytes) < 0)
      std::memcpy(copies_.at(place) + item_bytes, &id, sizeof(id));
  }
  // For an item of `aside`: id of a row that was removed, or -1.
  static int64_t id_aside(const char* item, size_t item_bytes) {
    int64_t id = 0;
    std::memcpy(&id, item + item_bytes, sizeof(id));
    return id;
  }
  // Restricts `next` to members of these buckets: [kNumBuckets], 0 where not wanted; null: all.
  void want(const uint8_t* buckets) {
    auto wanted = filled();
    if (buckets != nullptr) std::copy_n(buckets, wanted.size(), wanted.begin());
    if (wanted == wanted_) return;
    wanted_ = wanted;
    cursor_ = 0;
  }
  static constexpr int64_t kOver = -1, kLater = -2;
  // Next member of a wanted bucket; its row in place need not be copied from now on. kOver if there is none, kLater
  // after a look at `left` members, which is counted down. `bucket_at` maps a position to its bucket.
  template <class BucketAt>
  int64_t next(const BucketAt& bucket_at, int64_t& left) {
    const auto is_wanted = [&](int64_t position) { return wanted_[static_cast<size_t>(bucket_at(position))] != 0; };
    const int64_t position = members_.next_where(cursor_, [&](int64_t at) { return --left <= 0 || is_wanted(at); });
    if (position < 0) return kOver;
    cursor_ = position + 1;
    if (!is_wanted(position)) return kLater;
    members_.clear(position);
    if (in_place_.has(position)) leave_place(position);
    return position;
  }

 private:
  static constexpr int64_t kMaxKeptBytes = int64_t{256} << 20;

  static std::array<uint8_t, kNumBuckets> filled() {
    std::array<uint8_t, kNumBuckets> all;
    all.fill(1);
    return all;
  }

  void leave_place(int64_t position) {
    in_place_.clear(position);
    --only_in_place_;
  }

  Bits members_;   // members not read yet
  Bits in_place_;  // members neither copied aside nor read yet
  int64_t num_members_;
  int64_t only_in_place_;
  std::vector<int64_t> removed_;
  SlabArray copies_;
  IdIndex aside_;  // positions, by place in copies_
  std::array<uint8_t, kNumBuckets> wanted_ = filled();
  int64_t cursor_ = 0;  // the members below it are of buckets that are not wanted
};

}  // namespace geartrain
