// Log of written and removed rows since each of several moments, for several independent readers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "index/bits.hpp"
#include "moments/removed_rows.hpp"

namespace geartrain {

// Moments have ascending numbers. Between two known ones is a set of positions; the rows written since a moment are the
// union of the sets after it. A moment costs a bit for each row, in pages with writes, and a write records its rows
// once.
class Moments {
 public:
  static constexpr int64_t kNone = -1;

  // Positions written since the last moment; filled by the table.
  Bits& written() { return written_; }
  const Bits& written() const { return written_; }

  // Records the present moment and returns its number. Throws std::bad_alloc, and then nothing has changed.
  int64_t note() {
    known_.reserve(known_.size() + 1);
    if (!known_.empty()) known_.back().written_after = std::move(written_);
    written_ = Bits();
    known_.push_back({++last_, Bits(), RemovedRows()});
    return last_;
  }
  // Last known moment, or kNone.
  int64_t latest() const { return known_.empty() ? kNone : known_.back().number; }
  bool knows(int64_t moment) const { return find(moment) != known_.end(); }
  // Positions written since a known moment. Throws std::bad_alloc.
  Bits since(int64_t moment) const {
    Bits all = written_.copy();
    for (auto at = find(moment); at != known_.end(); ++at) all.add(at->written_after);
    return all;
  }
  // Ids of rows that existed at a known moment and were removed since; some have a row again.
  const std::vector<int64_t>& removed_since(int64_t moment) const { return find(moment)->removed.ids(); }
  // Makes room for `count` removals; see RemovedRows::reserve.
  template <class Present>
  void reserve_removals(int64_t count, const Present& present) {
    for (Known& known : known_) known.removed.reserve(count, present);
  }
  // Records the removal of the row of `id` at `position`.
  void note_removal(int64_t position, int64_t id) {
    const auto clear = [position](Bits& written) {
      if (written.has(position)) written.clear(position);
    };
    clear(written_);
    for (Known& known : known_) {
      clear(known.written_after);
      known.removed.note(position, id);
    }
  }
  // Drops a moment that is no longer needed; no effect if it is unknown. Without memory to join the sets before and
  // after it, older ones are dropped, too.
  void forget(int64_t moment) noexcept {
    const auto at = known_.begin() + (find(moment) - known_.cbegin());
    if (at == known_.end()) return;
    if (at == known_.begin()) {
      known_.erase(at);
      return;
    }
    const auto before = at - 1;
    Bits& after = at + 1 == known_.end() ? written_ : at->written_after;
    try {
      after.add(before->written_after);
    } catch (const std::bad_alloc&) {
      known_.erase(known_.begin(), at + 1);
      return;
    }
    before->written_after = &after == &written_ ? Bits() : std::move(after);
    known_.erase(at);
  }
  // Bytes of the sets between moments, and of removals.
  int64_t memory_bytes() const {
    int64_t bytes = 0;
    for (const Known& known : known_) bytes += known.written_after.memory_bytes() + known.removed.memory_bytes();
    return bytes;
  }

 private:
  struct Known {
    int64_t number;
    Bits written_after;  // before the next one that is known; of the last one they are in `written_`
    RemovedRows removed;
  };

  std::vector<Known>::const_iterator find(int64_t moment) const {
    return std::find_if(known_.begin(), known_.end(), [&](const Known& known) { return known.number == moment; });
  }

  int64_t last_ = 0;
  std::vector<Known> known_ = first();  // ascending
  Bits written_;

  static std::vector<Known> first() {
    std::vector<Known> known;
    known.push_back({0, Bits(), RemovedRows(Bits())});
    return known;
  }
};

}  // namespace geartrain
