#include "index/id_index.hpp"

#include <bit>
#include <new>

namespace geartrain {

IdIndex::IdIndex() : current_(make_table(kFirstLines)) {}

IdIndex::Table IdIndex::make_table(int64_t num_lines) {
  Table table;
  table.pages = Pages(static_cast<size_t>(num_lines) * sizeof(Line));
  table.pages.count_all();  // ids lie anywhere in it
  table.shift = 64 - std::countr_zero(static_cast<uint64_t>(num_lines));
  return table;
}

void IdIndex::Table::insert(uint64_t hash, uint64_t tag, int64_t position) {
  for (uint64_t at = place(hash);; at = next(at)) {
    Line& line = lines()[at];
    for (int64_t entry = 0; entry < kEntries; ++entry) {
      if (line.tags[entry] != 0) continue;
      line.tags[entry] = tag;
      line.positions[entry] = position;
      return;
    }
  }
}

void IdIndex::reserve(int64_t count) {
  if (count > (int64_t{1} << 48) - size_) throw std::bad_alloc();
  if (size_ + count <= most_entries(current_.num_lines())) return;
  int64_t num_lines = current_.num_lines() * 2;
  while (size_ + count > most_entries(num_lines)) num_lines *= 2;
  Table grown = make_table(num_lines);
  finish();  // only a batch about as large as the table itself meets an unfinished sweep
  old_ = std::move(current_);
  current_ = std::move(grown);
  frontier_ = 0;
}

void IdIndex::insert(int64_t id, int64_t position) {
  if (growing()) advance(kLinesMovedPerInsertion);
  const uint64_t hash = keyed_hash(id);
  const Table& table = table_of(hash);
  const_cast<Table&>(table).insert(hash, tag_of(id), position);
  ++size_;
}

// Sweeps at least `lines` old lines and on to the end of a run of full lines, so that no probe sequence crosses the frontier.
void IdIndex::advance(int64_t lines) {
  const uint64_t end = static_cast<uint64_t>(old_.num_lines());
  bool open = false;
  while (frontier_ < end && (lines > 0 || !open)) {
    open = old_.lines()[frontier_].tags[kEntries - 1] == 0;
    move_line(frontier_, false);
    ++frontier_;
    --lines;
  }
  if (frontier_ < end) return;
  // Ids of the last places may have run over into the first lines.
  for (uint64_t at = 0; !open; ++at) {
    open = old_.lines()[at].tags[kEntries - 1] == 0;
    move_line(at, true);
  }
  old_ = Table();
}

// Moves the entries of one old line: those at or after their place, or (wrapped) those that ran over the end.
void IdIndex::move_line(uint64_t at, bool wrapped) {
  const Line& line = old_.lines()[at];
  for (int64_t entry = 0; entry < kEntries && line.tags[entry] != 0; ++entry) {
    const uint64_t hash = keyed_hash(static_cast<int64_t>(line.tags[entry] - 1));
    if ((old_.place(hash) > at) == wrapped) current_.insert(hash, line.tags[entry], line.positions[entry]);
  }
}

void IdIndex::finish() {
  while (growing()) advance(old_.num_lines());
}

}  // namespace geartrain
