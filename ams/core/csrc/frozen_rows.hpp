// The rows of a table as they were at one moment, while writes go on.
//
// A row that is about to be written for the first time since that moment is copied aside; all others are read where they
// lie. So the moment itself costs a bit per position, a push pays for the rows it touches, and nothing stops for long.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <vector>

#include "id_index.hpp"
#include "slabs.hpp"

namespace geartrain {

using Bits = std::vector<uint64_t>;

inline bool has_bit(const Bits& bits, int64_t at) {
  return (bits[static_cast<size_t>(at / 64)] >> (at % 64) & 1) != 0;
}
inline void set_bit(Bits& bits, int64_t at) { bits[static_cast<size_t>(at / 64)] |= uint64_t{1} << (at % 64); }
inline void clear_bit(Bits& bits, int64_t at) { bits[static_cast<size_t>(at / 64)] &= ~(uint64_t{1} << (at % 64)); }

// Items are a row followed by its slot, if it has one, and the number of its last step, if the table counts them.
class FrozenRows {
 public:
  // `members`: the positions that belong to the moment; `touched_before`: what was touched since the moment before it;
  // `room`: memory for items to keep, whatever it holds.
  FrozenRows(Bits members, Bits touched_before, SlabArray room)
      : members_(members), in_place_(std::move(members)), touched_before_(std::move(touched_before)), copies_(std::move(room)) {}

  const Bits& members() const { return members_; }
  const Bits& touched_before() const { return touched_before_; }
  // The memory that was used, for the next moment: fresh pages cost a push more than the copies. Bounded, so that a
  // moment at which every row was written does not hold as much for good.
  SlabArray take_room() {
    copies_.keep(aside_.size(), kMostKeptBytes);
    return std::move(copies_);
  }
  bool is_only_in_place(int64_t position) const {
    return position / 64 < static_cast<int64_t>(in_place_.size()) && has_bit(in_place_, position);
  }

  // How many of the members are in place alone, and may still have to be kept.
  int64_t only_in_place() const {
    int64_t count = 0;
    for (uint64_t word : in_place_) count += std::popcount(word);
    return count;
  }

  // Makes room to keep `count` items. Throws std::bad_alloc, and then nothing has changed.
  void reserve(int64_t count) {
    aside_.reserve(count);
    for (int64_t place = aside_.size(); place < aside_.size() + count; ++place) copies_.ensure(place);
  }
  // Keeps the item of a position before it is overwritten; `reserve` must have made room.
  void keep_aside(int64_t position, std::initializer_list<std::span<const char>> item) {
    const int64_t place = aside_.size();
    aside_.insert(position, place);
    char* copy = copies_.at(place);
    for (const auto part : item) {
      if (!part.empty()) std::memcpy(copy, part.data(), part.size());
      copy += part.size();
    }
    clear_bit(in_place_, position);
  }
  // The kept item of a position, or null.
  const char* aside(int64_t position) const {
    const int64_t place = aside_.find(position);
    return place < 0 ? nullptr : copies_.at(place);
  }
  // The next position that belongs to the moment, or -1. Its row in place need not be kept from now on.
  int64_t next() {
    for (; cursor_ < static_cast<int64_t>(members_.size()) * 64; ++cursor_) {
      if (cursor_ % 64 == 0 && members_[static_cast<size_t>(cursor_ / 64)] == 0) {
        cursor_ += 63;
        continue;
      }
      if (has_bit(members_, cursor_)) {
        clear_bit(in_place_, cursor_);
        return cursor_++;
      }
    }
    return -1;
  }

 private:
  static constexpr int64_t kMostKeptBytes = int64_t{256} << 20;

  Bits members_;
  Bits in_place_;  // of the members: neither copied aside nor read yet
  Bits touched_before_;
  SlabArray copies_;
  IdIndex aside_;  // position -> place in copies_
  int64_t cursor_ = 0;
};

}  // namespace geartrain
