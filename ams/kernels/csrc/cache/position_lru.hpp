// LRU map from ids to positions of a slab of bounded size, under caches and queues of rows.
//
// Open addressing with linear probing, at most half full; an erased entry is closed by moving its run back, so there
// are no tombstones. The order is a doubly linked list over the positions. Every step is O(1); growing rehashes once.
#pragma once

#include <cstdint>
#include <vector>

#include "base/common.hpp"
#include "base/keyed_hash.hpp"

namespace geartrain {

class PositionLru {
 public:
  // 1 <= capacity <= kMaxPositions.
  explicit PositionLru(int64_t capacity) { grow(capacity); }

  static constexpr int64_t kMaxPositions = (int64_t{1} << 31) - 2;

  int64_t size() const { return size_; }
  int64_t capacity() const { return static_cast<int64_t>(ids_.size()); }

  // positions[i] = position of ids[i], or -1. With `touch` found ids become the most recently used, in order of i.
  void find(const int64_t* ids, int64_t count, int64_t* positions, bool touch);

  // Gives each of `count` <= capacity distinct ids its position and makes it the most recently used, in order of i.
  // Where no position is free the least recently used id loses its own. Returns how many lost it.
  int64_t place(const int64_t* ids, int64_t count, int64_t* positions);

  // positions[i] = the position that ids[i] had, which is free now, or -1.
  void remove(const int64_t* ids, int64_t count, int64_t* positions);

  // Writes the `count` least recently used, oldest first; returns how many there are.
  int64_t oldest(int64_t count, int64_t* ids, int64_t* positions) const;

  // Positions keep their numbers. Does nothing if it has that many. Throws std::bad_alloc, and then nothing has
  // changed.
  void grow(int64_t capacity);

 private:
  static constexpr int32_t kNone = -1;

  struct Entry {
    int64_t id = 0;
    int64_t position = kNone;
  };
  struct Link {
    int32_t older = kNone;
    int32_t newer = kNone;
  };

  size_t home(int64_t id) const { return static_cast<size_t>(keyed_hash(id) >> shift_); }
  size_t next(size_t at) const { return (at + 1) & (table_.size() - 1); }
  size_t seek(int64_t id) const;  // the entry of the id, or the empty one where it belongs
  void prefetch(const int64_t* ids, int64_t begin, int64_t end) const;
  void erase(size_t at);
  void unlink(int32_t position);
  void link_newest(int32_t position);
  int32_t take_position();

  std::vector<Entry> table_;  // a power of two
  int shift_ = 64;
  std::vector<int64_t> ids_;  // by position
  std::vector<Link> links_;   // by position
  std::vector<int32_t> free_;
  int32_t fresh_ = 0;  // positions from here on were never used
  int32_t oldest_ = kNone;
  int32_t newest_ = kNone;
  int64_t size_ = 0;
};

}  // namespace geartrain
