// Part of a row store: records when and how often each row was pushed, and evicts rows for want of room.
#include <algorithm>
#include <numeric>
#include <utility>

#include "machine/lookahead.hpp"
#include "machine/too_many_ids.hpp"
#include "store/row_store.hpp"

namespace geartrain {
namespace {

// At least 1 / kEvictedShare of a table's rows is evicted at a time, since the search visits all rows.
constexpr int64_t kEvictedShare = 32;
// Other shards hold other rows of a write: the share of max_bytes that this shard's part may take.
constexpr double kSpareRoom = 1.25;

}  // namespace

LifeClock RowStore::clock() const {
  std::shared_lock lock(mutex_);
  return clock_;
}

void RowStore::advance_clock(const LifeClock& clock) {
  std::unique_lock lock(mutex_);
  const LifeClock before = clock_;
  clock_.advance(clock);
  date_rows(before);
}

LifeClock RowStore::pop_leap() {
  std::unique_lock lock(mutex_);
  return std::exchange(leap_, {});
}

int64_t RowStore::num_evicted() const {
  std::shared_lock lock(mutex_);
  return num_evicted_;
}

int64_t RowStore::read_lives(int64_t& position, int64_t most, int64_t* ids, RowLife* lives) const {
  std::shared_lock lock(mutex_);
  int64_t count = 0;
  std::visit(
      [&](const auto& directory) {
        for (; count < most && (position = directory.next_present(position)) >= 0; ++position) {
          ids[count] = directory.id_at(position);
          if (lives_) lives[count] = life_at(item_at(position));
          ++count;
        }
      },
      directory_);
  return count;
}

// A push without a time counts as of the time of the previous push. A row is as recent as the table's clock, whatever
// its own worker counts: a worker that joined later stays behind the others for good.
void RowStore::note_seen(const std::vector<int64_t>& positions, const BatchFacts& batch, bool counts) {
  constexpr size_t kPrefetchDistance = 16;
  constexpr double kLast = UINT32_MAX;
  const LifeClock before = clock_;
  LifeClock said = before;
  if (batch.step) said.step = *batch.step;
  if (batch.unix_seconds) said.seconds = static_cast<int64_t>(std::min(*batch.unix_seconds, kLast));
  clock_.advance(said);
  // see date_rows
  const auto moved = [this](int64_t now, int64_t then) { return has_undated_ && then == 0 ? 0 : now - then; };
  if (num_rows_there() > static_cast<int64_t>(positions.size()))  // other rows became older by that
    leap_.advance({moved(clock_.step, before.step), moved(clock_.seconds, before.seconds)});
  if (!lives_) return;
  date_rows(before);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (i + kPrefetchDistance < positions.size())
      prefetch_bytes(lives_->at(item_at(positions[i + kPrefetchDistance])), sizeof(RowLife));
    RowLife& life = life_at(item_at(positions[i]));
    life.step = clock_.step;
    life.seconds = static_cast<uint32_t>(clock_.seconds);
    if (counts) add_occurrences(life.count, batch.occurrences_of(static_cast<int64_t>(i)));
  }
}

// Allocates lives for all existing rows.
SlabArray RowStore::new_lives() const {
  const int64_t items = items_ != nullptr ? items_->num_items() : std::get<HashedDirectory>(directory_).end();
  SlabArray lives(static_cast<int64_t>(sizeof(RowLife)), items_ != nullptr ? items_->most_items() : INT64_MAX);
  for (int64_t item = 0; item < items; ++item) lives.ensure(item);
  return lives;
}

// Rows older than the table's lives count as seen when its clock began: their time is unknown, and must not evict them.
void RowStore::date_rows(const LifeClock& before) {
  const bool steps_begin = before.step == 0 && clock_.step != 0,
             seconds_begin = before.seconds == 0 && clock_.seconds != 0;
  if (!has_undated_ || (!steps_begin && !seconds_begin)) return;
  std::visit(
      [&](const auto& directory) {
        for (int64_t position = 0; (position = directory.next_present(position)) >= 0; ++position) {
          RowLife& life = life_at(item_at(position));
          if (life.step == 0) life.step = clock_.step;
          if (life.seconds == 0) life.seconds = static_cast<uint32_t>(clock_.seconds);
        }
      },
      directory_);
}

int64_t RowStore::bytes_of_rows(int64_t count) const {
  return count * static_cast<int64_t>(row_bytes() + slot_bytes() + step_bytes() + life_bytes()) +
         IdIndex::most_bytes(count);
}

int64_t RowStore::max_rows_within(int64_t bytes) const {
  int64_t fits = 0, too_many = bytes / static_cast<int64_t>(row_bytes()) + 1;
  while (too_many - fits > 1) {
    const int64_t middle = std::midpoint(fits, too_many);
    (bytes_of_rows(middle) <= bytes ? fits : too_many) = middle;
  }
  return fits;
}

// Returns the first `count` > 0 candidates for eviction among existing rows, without the positions `kept`, and
// `others`.
std::vector<Candidate> RowStore::first_to_go(int64_t count, const std::vector<int64_t>& kept,
                                             std::vector<Candidate> others) {
  const auto& directory = std::get<HashedDirectory>(directory_);
  Bits stays;
  for (int64_t position : kept) {
    if (position < 0) continue;
    stays.ensure(position);
    stays.set(position);
  }
  std::vector<Candidate> first = std::move(others);
  const size_t wanted = static_cast<size_t>(count);
  bool is_cut = false;  // then first[wanted - 1] is the last possible candidate
  const auto cut = [&] {
    if (first.size() <= wanted) return;
    std::nth_element(first.begin(), first.begin() + (count - 1), first.end());
    first.resize(wanted);
    is_cut = true;
  };
  first.reserve(std::max(2 * wanted, first.size()) + 1);
  for (int64_t position = 0; (position = directory.next_present(position)) >= 0; ++position) {
    if (stays.has(position)) continue;
    const Candidate candidate{life_at(position), directory.id_at(position), position};
    if (is_cut && !(candidate < first[wanted - 1])) continue;
    first.push_back(candidate);
    if (first.size() >= 2 * wanted) cut();
  }
  cut();
  return first;
}

// Evicts rows, none of the write's own, to make room for the missing rows of a write. Throws TooManyRows, or
// std::bad_alloc, and then nothing has changed.
void RowStore::make_way(const Resolved& found) {
  const int64_t coming = static_cast<int64_t>(found.missing.size()), there = num_rows_there();
  if (coming == 0 || there + coming <= max_rows_) return;
  const int64_t staying = static_cast<int64_t>(found.positions.size()) - coming;
  if (staying + coming > max_rows_) {
    const auto share = static_cast<double>(spec_.owned_buckets.size()) / kNumBuckets;
    const double wanted = static_cast<double>(bytes_of_rows(staying + coming)) / share;
    throw TooManyRows{coming,    staying, max_rows_, spec_.max_bytes, static_cast<int64_t>(wanted * kSpareRoom),
                      spec_.name};
  }
  // As many that new rows get freed places, and need no memory that could be refused.
  evict(std::min(std::max({coming, max_rows_ / kEvictedShare, there + coming - max_rows_}), there - staying),
        found.positions);
}

void RowStore::evict(int64_t count, const std::vector<int64_t>& kept) {
  const std::vector<Candidate> leaving = first_to_go(count, kept);
  std::vector<int64_t> ids(leaving.size());
  std::ranges::transform(leaving, ids.begin(), &Candidate::id);
  for (const Candidate& candidate : leaving) moments_.written().ensure(candidate.place);
  num_evicted_ += remove_rows(ids.data(), static_cast<int64_t>(ids.size()));
}

// Of rows to be restored, some of them missing: returns the places of those that have room, after evicting candidates.
std::vector<size_t> RowStore::that_fit(const int64_t* ids, const Resolved& found, const RowLife* lives) {
  std::vector<Candidate> coming;
  for (size_t i = 0; i < found.positions.size(); ++i)
    if (found.positions[i] < 0)
      coming.push_back({lives != nullptr ? lives[i] : RowLife{}, ids[i], -1 - static_cast<int64_t>(i)});
  std::vector<uint8_t> fits(found.positions.size(), 1);
  std::vector<int64_t> evicted;
  const int64_t excess = num_rows_there() + static_cast<int64_t>(coming.size()) - max_rows_;
  for (const Candidate& candidate : first_to_go(excess, found.positions, std::move(coming))) {
    if (candidate.place < 0)
      fits[static_cast<size_t>(-1 - candidate.place)] = 0;
    else
      evicted.push_back(candidate.id);
  }
  num_evicted_ +=
      excess - static_cast<int64_t>(evicted.size()) + remove_rows(evicted.data(), static_cast<int64_t>(evicted.size()));
  std::vector<size_t> places;
  for (size_t i = 0; i < fits.size(); ++i)
    if (fits[i] != 0) places.push_back(i);
  return places;
}

}  // namespace geartrain
