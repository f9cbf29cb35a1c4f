// id -> position, open addressing over cache lines of four entries.
//
// A line's place is the top bits of the keyed hash. Twice the lines means one bit more, so the table's order never changes and
// growth is one sweep from low places to high: below the frontier an id lives in the new lines, above it in the old ones. A
// lookup probes one of them, an insertion moves the frontier on by a few lines, and fresh pages are touched in order. Nothing
// ever stalls for a rehash.
#pragma once

#include <bit>
#include <cstdint>

#include "base/common.hpp"
#include "base/keyed_hash.hpp"
#include "base/pages.hpp"

namespace geartrain {

class IdIndex {
 public:
  IdIndex();

  int64_t size() const { return size_; }
  int64_t capacity() const { return current_.num_lines() * kEntries; }
  int64_t memory_bytes() const { return static_cast<int64_t>(current_.pages.bytes() + old_.pages.bytes()); }

  void prefetch(int64_t id) const { prefetch_bytes(&home(id), 1); }

  // The position of `id` (>= 0), or -1.
  int64_t find(int64_t id) const {
    const uint64_t hash = keyed_hash(id);
    return table_of(hash).find(hash, tag_of(id));
  }

  // Makes sure that `count` insertions will succeed. Throws std::bad_alloc, and then nothing has changed.
  void reserve(int64_t count);

  // Adds an absent id; `reserve` must have made room.
  void insert(int64_t id, int64_t position);

 private:
  static constexpr int64_t kEntries = 4;
  static constexpr int64_t kFirstLines = 64;
  static constexpr int64_t kLinesMovedPerInsertion = 4;

  struct alignas(64) Line {
    uint64_t tags[kEntries];  // id + 1; 0 is empty. Entries fill from the first on.
    int64_t positions[kEntries];
  };

  struct Table {
    Pages pages;
    int shift = 64;  // place = hash >> shift

    Line* lines() const { return reinterpret_cast<Line*>(pages.data()); }
    int64_t num_lines() const { return pages.data() == nullptr ? 0 : int64_t{1} << (64 - shift); }
    uint64_t place(uint64_t hash) const { return hash >> shift; }
    uint64_t next(uint64_t place) const { return (place + 1) & static_cast<uint64_t>(num_lines() - 1); }

    int64_t find(uint64_t hash, uint64_t tag) const {
      for (uint64_t at = place(hash);; at = next(at)) {
        const Line& line = lines()[at];
        // All four at once: which entry it is cannot be predicted, that it is in the first line mostly can.
        unsigned match = 0;
        for (int entry = 0; entry < kEntries; ++entry) match |= static_cast<unsigned>(line.tags[entry] == tag) << entry;
        if (match != 0) return line.positions[std::countr_zero(match)];
        if (line.tags[kEntries - 1] == 0) return -1;
      }
    }
    void insert(uint64_t hash, uint64_t tag, int64_t position);
  };

  static uint64_t tag_of(int64_t id) { return static_cast<uint64_t>(id) + 1; }
  static Table make_table(int64_t num_lines);
  static int64_t most_entries(int64_t num_lines) { return num_lines * kEntries * 5 / 8; }

  bool growing() const { return old_.pages.data() != nullptr; }
  const Table& table_of(uint64_t hash) const {
    return growing() && old_.place(hash) >= frontier_ ? old_ : current_;
  }
  const Line& home(int64_t id) const {
    const uint64_t hash = keyed_hash(id);
    const Table& table = table_of(hash);
    return table.lines()[table.place(hash)];
  }
  void advance(int64_t lines);
  void move_line(uint64_t at, bool wrapped);
  void finish();

  Table current_;
  Table old_;              // empty unless growing
  uint64_t frontier_ = 0;  // in lines of old_: ids whose old place is below it have moved
  int64_t size_ = 0;
};

}  // namespace geartrain
