#include "index/id_index.hpp"

#include <new>

#include "machine/too_many_ids.hpp"

namespace geartrain {

IdIndex::IdIndex() : current_(make_table(kFirstLines)) {}

IdIndex::Table IdIndex::make_table(int64_t num_lines) {
  Table table;
  table.pages = Pages(static_cast<size_t>(num_lines) * sizeof(Line));
  table.pages.count_all();  // ids lie anywhere in it
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
  if (count > kMostIds - size_) throw TooManyIds(count, size_, kMostIds);
  for (int64_t number = size_; number < size_ + count; ++number) ids_.ensure(number, news);
  int64_t num_lines = static_cast<int64_t>(current_.num_lines);
  if (size_ + count <= most_ids(num_lines)) return;
  while (size_ + count > most_ids(num_lines)) num_lines = num_lines * 7 / 5;
  Table grown = make_table(num_lines);
  finish();  // only a batch about as large as the table itself meets an unfinished sweep
  old_ = std::move(current_);
  current_ = std::move(grown);
  frontier_ = 0;
}

int64_t IdIndex::insert(int64_t id) {
  if (growing() && size_ % kInsertionsOfASweep == 0) advance(kLinesOfASweep);
  const uint64_t hash = keyed_hash(id);
  const_cast<Table&>(table_of(hash)).insert(hash, tag_of(id), size_);
  *reinterpret_cast<int64_t*>(ids_.at(size_)) = id;
  return size_++;
}

// Sweeps at least `lines` old lines and on to the end of a run of full lines, so that no probe sequence crosses the frontier.
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
  // Ids of the last places may have run over into the first lines.
  for (uint64_t at = 0; !open; ++at) {
    open = !old_.lines()[at].is_full();
    move_line(at, true);
  }
  old_ = Table();
}

// Moves the entries of one old line: those at or after their place, or (wrapped) those that ran over the end.
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
