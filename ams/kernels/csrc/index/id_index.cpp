#include "index/id_index.hpp"

#include <algorithm>
#include <new>

#include "machine/too_many_ids.hpp"

namespace geartrain {

IdIndex::IdIndex() : current_(make_table(kFirstLines)) {}

int64_t IdIndex::most_bytes(int64_t count) {
  int64_t lines = kFirstLines, before = 0;
  while (count > max_ids(lines)) {
    before = lines;
    lines = lines * 7 / 5;
  }
  const auto bytes = [](int64_t of_lines) {
    return static_cast<int64_t>(Pages::rounded(static_cast<size_t>(of_lines) * sizeof(Line)));
  };
  return bytes(lines) + bytes(before) + count * static_cast<int64_t>(sizeof(int64_t) + sizeof(uint32_t));
}

IdIndex::Table IdIndex::make_table(int64_t num_lines) {
  Table table;
  table.pages = Pages(static_cast<size_t>(num_lines) * sizeof(Line));
  table.pages.count_all();  // ids are spread over all of it
  table.num_lines = static_cast<uint64_t>(num_lines);
  return table;
}

void IdIndex::Table::insert(uint64_t hash, uint64_t tag, int64_t number) {
  for (uint64_t at = place(hash);; at = next(at)) {
    Line& line = lines()[at];
    for (int entry = 0; entry < kEntries; ++entry) {
      if (line.tags[entry] != 0) continue;
      line.tags[entry] = tag;
      line.numbers[entry] = static_cast<uint32_t>(number);
      return;
    }
  }
}

void IdIndex::reserve(int64_t count, NewMemory* news) {
  const int64_t fresh = std::max<int64_t>(0, count - static_cast<int64_t>(released_.size()));
  if (fresh > kMaxIds - end_) throw TooManyIds(count, size_, kMaxIds);
  for (int64_t number = end_; number < end_ + fresh; ++number) ids_.ensure(number, news);
  int64_t num_lines = static_cast<int64_t>(current_.num_lines);
  if (size_ + count <= max_ids(num_lines)) return;
  while (size_ + count > max_ids(num_lines)) num_lines = num_lines * 7 / 5;
  Table grown = make_table(num_lines);
  finish();  // only a batch about as large as the table itself meets an unfinished sweep
  old_ = std::move(current_);
  current_ = std::move(grown);
  frontier_ = 0;
}

int64_t IdIndex::insert(int64_t id) {
  if (growing() && insertions_ % kInsertionsOfASweep == 0) advance(kLinesOfASweep);
  ++insertions_;
  const uint64_t hash = keyed_hash(id);
  int64_t number = end_;
  if (released_.empty()) {
    ++end_;
  } else {
    number = released_.back();
    released_.pop_back();
  }
  const_cast<Table&>(table_of(hash)).insert(hash, tag_of(id), number);
  *reinterpret_cast<int64_t*>(ids_.at(number)) = id;
  ++size_;
  return number;
}

int64_t IdIndex::erase(int64_t id) {
  const uint64_t hash = keyed_hash(id);
  const int64_t number = const_cast<Table&>(table_of(hash)).erase(hash, tag_of(id));
  if (number >= 0) --size_;
  return number;
}

void IdIndex::reserve_releases(int64_t count) {
  const size_t needed = released_.size() + static_cast<size_t>(count);
  if (needed > released_.capacity()) released_.reserve(std::max(needed, 2 * released_.capacity()));
}

// No line keeps a gap: an entry is found in the lines from its place to the first one that is not full, so an entry
// behind the gap that may fill it must move there.
//
// Old lines below the frontier hold copies of entries that have moved. They may be shifted, too, but never before their
// place, by which `move_line` recognises them.
int64_t IdIndex::Table::erase(uint64_t hash, uint64_t tag) {
  uint64_t gap = place(hash);
  int entry = 0;
  for (;; gap = next(gap)) {
    const Line& line = lines()[gap];
    for (entry = 0; entry < kEntries && line.tags[entry] != tag; ++entry) {
    }
    if (entry < kEntries) break;
    if (!line.is_full()) return -1;
  }
  const int64_t number = lines()[gap].numbers[entry];
  const auto distance = [this](uint64_t from, uint64_t to) { return to >= from ? to - from : to + num_lines - from; };
  for (;;) {
    Line& line = lines()[gap];
    const bool was_full = line.is_full();
    if (was_full) {
      // The first later entry whose place is at or before the gap.
      uint64_t from = gap;
      int moved = -1;
      do {
        from = next(from);
        const Line& behind = lines()[from];
        for (int entry = 0; entry < kEntries && behind.tags[entry] != 0 && moved < 0; ++entry) {
          const uint64_t home = place(keyed_hash(static_cast<int64_t>(behind.tags[entry] - 1)));
          if (distance(home, from) >= distance(gap, from)) moved = entry;
        }
      } while (moved < 0 && lines()[from].is_full() && from != gap);
      if (moved >= 0) {
        line.tags[entry] = lines()[from].tags[moved];
        line.numbers[entry] = lines()[from].numbers[moved];
        gap = from;
        entry = moved;
        continue;
      }
    }
    int last = entry;
    while (last + 1 < kEntries && line.tags[last + 1] != 0) ++last;
    line.tags[entry] = line.tags[last];
    line.numbers[entry] = line.numbers[last];
    line.tags[last] = 0;
    return number;
  }
}

// Sweeps at least `lines` old lines and on to the end of a run of full lines, so that no probe sequence crosses the
// frontier.
void IdIndex::advance(int64_t lines) {
  const uint64_t end = old_.num_lines;
  bool open = false;
  while (frontier_ < end && (lines > 0 || !open)) {
    open = !old_.lines()[frontier_].is_full();
    move_line(frontier_, false);
    ++frontier_;
    --lines;
  }
  if (frontier_ < end) return;
  // Ids of the last places may have overflowed into the first lines.
  for (uint64_t at = 0; !open; ++at) {
    open = !old_.lines()[at].is_full();
    move_line(at, true);
  }
  old_ = Table();
}

// Moves the entries of one old line: those at or after their place, or (wrapped) those that overflowed past the end.
void IdIndex::move_line(uint64_t at, bool wrapped) {
  const Line& line = old_.lines()[at];
  for (int entry = 0; entry < kEntries && line.tags[entry] != 0; ++entry) {
    const uint64_t hash = keyed_hash(static_cast<int64_t>(line.tags[entry] - 1));
    if ((old_.place(hash) > at) == wrapped) current_.insert(hash, line.tags[entry], line.numbers[entry]);
  }
}

void IdIndex::finish() {
  while (growing()) advance(static_cast<int64_t>(old_.num_lines));
}

}  // namespace geartrain
