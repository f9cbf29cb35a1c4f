// Hash index of ids, numbered in order of arrival: id -> number by open addressing over cache lines of five entries,
// number -> id by an array. Numbers of erased ids are reused, the last released one first.
//
// A line's place is the keyed hash as a fraction of all lines. With more lines the order of the table stays, so that
// growth, by two fifths, is one sweep from low places to high: below the frontier ids are in the new lines, above it in
// the old ones. A lookup probes one of them, an insertion advances the frontier by a few lines, and fresh pages are
// touched in order. No operation stalls for a rehash.
//
// An id takes 28 to 36 bytes, 57 during growth. Fuller lines, and entries with a byte of the hash in place of the id,
// took 15 to 25; a pull of 64-byte rows then took a third longer, for another memory access or for overflowing lines.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "base/common.hpp"
#include "base/keyed_hash.hpp"
#include "index/slabs.hpp"
#include "machine/pages.hpp"

namespace geartrain {

class IdIndex {
 public:
  IdIndex();

  // Number of ids.
  int64_t size() const { return size_; }
  // Upper bound of all numbers, exclusive.
  int64_t end() const { return end_; }
  int64_t memory_bytes() const {
    return static_cast<int64_t>(current_.pages.bytes() + old_.pages.bytes()) +
           end_ * static_cast<int64_t>(sizeof(int64_t)) + static_cast<int64_t>(released_.size() * sizeof(uint32_t));
  }

  // Most bytes of an index of `count` ids, during its growth.
  static int64_t most_bytes(int64_t count);

  void prefetch(int64_t id) const { prefetch_bytes(&home(id), 1); }

  // Number of `id` (>= 0), or -1.
  int64_t find(int64_t id) const {
    const uint64_t hash = keyed_hash(id);
    return table_of(hash).find(hash, tag_of(id));
  }
  int64_t id_at(int64_t number) const { return *reinterpret_cast<const int64_t*>(ids_.at(number)); }

  // Makes `count` insertions possible. Throws std::bad_alloc; then nothing has changed once `news` is destroyed.
  void reserve(int64_t count, NewMemory* news = nullptr);

  // Gives a number to an absent id; `reserve` must have been called.
  int64_t insert(int64_t id);
  // Number that the insertion after `ahead` others will give.
  int64_t next_number(int64_t ahead) const {
    const int64_t released = static_cast<int64_t>(released_.size());
    return ahead < released ? released_[static_cast<size_t>(released - 1 - ahead)] : end_ + ahead - released;
  }

  // Erases an id and returns its number, or -1. `id_at` still returns it, and the number is not reused, until the
  // release.
  int64_t erase(int64_t id);
  // Makes `count` releases possible. Throws std::bad_alloc, and then nothing has changed.
  void reserve_releases(int64_t count);
  void release(int64_t number) { released_.push_back(static_cast<uint32_t>(number)); }

 private:
  static constexpr int kEntries = 5;
  static constexpr int64_t kFirstLines = 64;
  static constexpr int64_t kInsertionsOfASweep = 4, kLinesOfASweep = 8;
  static constexpr int64_t kMaxIds = INT64_C(0xFFFFFFFF);

  struct alignas(64) Line {
    uint64_t tags[kEntries];  // id + 1; 0 is empty. Entries fill from the first on.
    uint32_t numbers[kEntries];

    bool is_full() const { return tags[kEntries - 1] != 0; }
  };

  struct Table {
    Pages pages;
    uint64_t num_lines = 0;

    Line* lines() const { return reinterpret_cast<Line*>(pages.data()); }
    uint64_t place(uint64_t hash) const {
      return static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * num_lines >> 64);
    }
    uint64_t next(uint64_t place) const { return place + 1 == num_lines ? 0 : place + 1; }

    int64_t find(uint64_t hash, uint64_t tag) const {
      for (uint64_t at = place(hash);; at = next(at)) {
        const Line& line = lines()[at];
        // Compared all at once: the entry cannot be predicted, but the first line mostly has it.
        unsigned match = 0;
        for (int entry = 0; entry < kEntries; ++entry) match |= static_cast<unsigned>(line.tags[entry] == tag) << entry;
        if (match != 0) return line.numbers[std::countr_zero(match)];
        if (!line.is_full()) return -1;
      }
    }
    void insert(uint64_t hash, uint64_t tag, int64_t number);
    int64_t erase(uint64_t hash, uint64_t tag);
  };

  static uint64_t tag_of(int64_t id) { return static_cast<uint64_t>(id) + 1; }
  static int64_t max_ids(int64_t num_lines) { return num_lines * 13 / 4; }
  static Table make_table(int64_t num_lines);

  bool growing() const { return old_.num_lines != 0; }
  const Table& table_of(uint64_t hash) const { return growing() && old_.place(hash) >= frontier_ ? old_ : current_; }
  const Line& home(int64_t id) const {
    const uint64_t hash = keyed_hash(id);
    const Table& table = table_of(hash);
    return table.lines()[table.place(hash)];
  }
  void advance(int64_t lines);
  void move_line(uint64_t at, bool wrapped);
  void finish();

  SlabArray ids_{sizeof(int64_t), INT64_MAX};  // by number
  Table current_;
  Table old_;              // empty unless growing
  uint64_t frontier_ = 0;  // in lines of old_: ids whose old place is below it have moved
  int64_t size_ = 0, end_ = 0;
  int64_t insertions_ = 0;
  std::vector<uint32_t> released_;
};

}  // namespace geartrain
