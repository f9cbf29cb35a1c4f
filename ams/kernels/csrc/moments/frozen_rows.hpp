// The rows of a table as they were at one moment, while writes go on.
//
// A row that is about to be written for the first time since that moment is copied aside; all others are read where they
// lie. So the moment itself costs about a bit per row, a push pays for the rows it touches, and nothing stops for long.
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

// Items are a row followed by its slot, if it has one, by the number of its last step and by its life, if the table keeps those. Behind
// an item kept aside lies its id if its row was removed since: the position may be another row's by then.
class FrozenRows {
 public:
  // `members`: the positions that belong to the moment; `room`: memory for items to keep, whatever it holds.
  FrozenRows(Bits members, SlabArray room)
      : members_(std::move(members)),
        in_place_(members_.copy()),
        num_members_(members_.count()),
        only_in_place_(num_members_),
        copies_(std::move(room)) {}

  int64_t num_members() const { return num_members_; }
  // Ids of rows that were removed before the moment and belong to a snapshot of what changed; the table's to fill.
  std::vector<int64_t>& removed() { return removed_; }
  const std::vector<int64_t>& removed() const { return removed_; }
  // The memory that was used, for the next moment: fresh pages cost a push more than the copies. Bounded, so that a
  // moment at which every row was written does not hold as much for good.
  SlabArray take_room() {
    copies_.keep(aside_.size(), kMostKeptBytes);
    return std::move(copies_);
  }
  bool is_only_in_place(int64_t position) const { return in_place_.has(position); }

  // How many of the members are in place alone, and may still have to be kept.
  int64_t only_in_place() const { return only_in_place_; }

  int64_t num_aside() const { return aside_.size(); }
  // Of the index of what was copied aside.
  int64_t index_bytes() const { return aside_.memory_bytes(); }

  // Makes room to keep `count` items. Throws std::bad_alloc, and then nothing has changed.
  void reserve(int64_t count) {
    aside_.reserve(count);
    for (int64_t place = aside_.size(); place < aside_.size() + count; ++place) copies_.ensure(place);
  }
  // Keeps the item of a position before it is overwritten; `reserve` must have made room.
  void keep_aside(int64_t position, std::initializer_list<std::span<const char>> item) {
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
  // The kept item of a position, or null.
  const char* aside(int64_t position) const {
    const int64_t place = aside_.find(position);
    return place < 0 ? nullptr : copies_.at(place);
  }
  // The row of `id` at a position is removed; if a freeze needs it, it was kept aside.
  void note_removal(int64_t position, int64_t id, size_t item_bytes) {
    const int64_t place = aside_.find(position);
    if (place >= 0 && id_aside(copies_.at(place), item_bytes) < 0) std::memcpy(copies_.at(place) + item_bytes, &id, sizeof(id));
  }
  // Of what `aside` gave: the id of a row that was removed, or -1.
  static int64_t id_aside(const char* item, size_t item_bytes) {
    int64_t id = 0;
    std::memcpy(&id, item + item_bytes, sizeof(id));
    return id;
  }
  // From now on `next` gives members of these buckets only: [kNumBuckets], 0 where not wanted; null: all are.
  void want(const uint8_t* buckets) {
    auto wanted = filled();
    if (buckets != nullptr) std::copy_n(buckets, wanted.size(), wanted.begin());
    if (wanted == wanted_) return;
    wanted_ = wanted;
    cursor_ = 0;
  }
  static constexpr int64_t kOver = -1, kLater = -2;
  // The next member of a wanted bucket that was not given yet; its row in place need not be kept from now on. kOver if
  // there is none, kLater once `left` members were looked at, which is counted down. `bucket_at` maps a position to its bucket.
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
  static constexpr int64_t kMostKeptBytes = int64_t{256} << 20;

  static std::array<uint8_t, kNumBuckets> filled() {
    std::array<uint8_t, kNumBuckets> all;
    all.fill(1);
    return all;
  }

  void leave_place(int64_t position) {
    in_place_.clear(position);
    --only_in_place_;
  }

  Bits members_;   // that were not read yet
  Bits in_place_;  // of the members: neither copied aside nor read yet
  int64_t num_members_;
  int64_t only_in_place_;
  std::vector<int64_t> removed_;
  SlabArray copies_;
  IdIndex aside_;  // positions, by place in copies_
  std::array<uint8_t, kNumBuckets> wanted_ = filled();
  int64_t cursor_ = 0;  // the members below it are of buckets that are not wanted
};

}  // namespace geartrain
