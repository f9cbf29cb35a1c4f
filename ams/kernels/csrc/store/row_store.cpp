#include "store/row_store.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "store/find_all.hpp"

namespace geartrain {
namespace {

constexpr uint64_t kAdmissionKey = 0x61646D697373696F;  // so that its hashes differ from those of rounding

BucketRanks ranks_of(const std::vector<int64_t>& owned) {
  BucketRanks ranks;
  ranks.fill(-1);
  int16_t rank = 0;
  for (int64_t bucket : owned) ranks[static_cast<size_t>(bucket)] = rank++;
  return ranks;
}

int64_t item_bytes_of(const RowStoreSpec& spec) {
  return spec.dim * static_cast<int64_t>(item_bytes(spec.dtype)) +
         spec.slot_dim() * static_cast<int64_t>(item_bytes(spec.slot_dtype)) +
         (spec.counts_steps() || spec.counts_updates() ? static_cast<int64_t>(sizeof(int64_t)) : 0) +
         (spec.keeps_lives ? static_cast<int64_t>(sizeof(RowLife)) : 0);
}

Directory directory_for(const RowStoreSpec& spec) {
  const BucketRanks ranks = ranks_of(spec.owned_buckets);
  if (spec.num_rows < 0) return HashedDirectory(ranks);
  return DenseDirectory(ranks, spec.owned_buckets, spec.num_rows, item_bytes_of(spec));
}

// Returns null if every id is admitted.
std::unique_ptr<Admission> admission_for(RowStoreSpec& spec, uint64_t rounding_key) {
  if (spec.admission.kind == AdmissionSpec::Kind::all) return nullptr;
  spec.admission.key = splitmix64(rounding_key ^ kAdmissionKey);
  spec.admission.is_dense = spec.num_rows >= 0;
  spec.admission.owned_share = static_cast<double>(spec.owned_buckets.size()) / kNumBuckets;
  return std::make_unique<Admission>(spec.admission);
}

DenseItems* items_of(Directory& directory) {
  auto* dense = std::get_if<DenseDirectory>(&directory);
  return dense != nullptr ? &dense->items() : nullptr;
}

}  // namespace

RowStore::RowStore(const RowStoreSpec& spec)
    : spec_(spec),
      num_slots_(spec.optimizer->num_slots()),
      slot_dim_(static_cast<size_t>(spec.slot_dim())),
      rounding_key_(rounding_key(spec.initial.seed, spec.initial.table_hash)),
      directory_(directory_for(spec)),
      items_(items_of(directory_)),
      rows_(spec.dim * static_cast<int64_t>(item_bytes(spec.dtype)),
            items_ != nullptr ? items_->most_items() : INT64_MAX),
      bounds_{rounded_to_nearest(static_cast<float>(spec.initial.bound()), spec.dtype), {}} {
  const int64_t most_items = items_ != nullptr ? items_->most_items() : INT64_MAX;
  if (spec.slot_dim() > 0)
    slots_.emplace(spec.slot_dim() * static_cast<int64_t>(item_bytes(spec.slot_dtype)), most_items);
  if (spec.counts_steps() || spec.counts_updates())
    row_steps_.emplace(static_cast<int64_t>(sizeof(int64_t)), most_items);
  if (spec.counts_steps()) steps_.emplace(*spec.optimizer->drift());
  admission_ = admission_for(spec_, rounding_key_);
  if (spec.keeps_lives) lives_.emplace(static_cast<int64_t>(sizeof(RowLife)), most_items);
  if (spec.max_bytes >= 0) max_rows_ = max_rows_within(spec.max_bytes);
}

int64_t RowStore::alter(const RowStoreSpec& to) {
  std::unique_lock lock(mutex_);
  RowStoreSpec altered = spec_;
  altered.optimizer = to.optimizer;
  altered.initial = to.initial;
  altered.counts_occurrences = to.counts_occurrences;
  altered.admission = to.admission;
  altered.keeps_lives = to.keeps_lives;
  altered.max_bytes = to.max_bytes;
  std::unique_ptr<Admission> admission = admission_for(altered, rounding_key_);
  const bool counts_anew = altered.admission != spec_.admission,
             has_other_lives = altered.keeps_lives != spec_.keeps_lives;
  if (frozen_ && (counts_anew || has_other_lives)) return -1;
  std::optional<SlabArray> lives;
  if (altered.keeps_lives && has_other_lives) lives.emplace(new_lives());
  // From here on nothing can fail.
  if (counts_anew) admission_ = std::move(admission);
  spec_ = std::move(altered);
  bounds_.row = std::max(bounds_.row, rounded_to_nearest(static_cast<float>(spec_.initial.bound()), spec_.dtype));
  if (has_other_lives) {
    lives_ = std::move(lives);
    room_.reset();  // its items have another size
    room_items_ = 0;
    has_undated_ = lives_.has_value();
    date_rows({});
  }
  max_rows_ = spec_.max_bytes >= 0 ? max_rows_within(spec_.max_bytes) : INT64_MAX;
  const int64_t before = num_evicted_;
  try {
    if (num_rows_there() > max_rows_) evict(num_rows_there() - max_rows_, {});
  } catch (const std::bad_alloc&) {
    // The next write with new rows evicts them, or is refused.
  }
  return num_evicted_ - before;
}

int64_t RowStore::num_present() const {
  std::shared_lock lock(mutex_);
  return num_rows_there();
}

int64_t RowStore::memory_bytes() const {
  const MemoryParts parts = memory_parts();
  return parts.rows + parts.slots + parts.index + parts.snapshots;
}

RowStore::MemoryParts RowStore::memory_parts() const {
  std::shared_lock lock(mutex_);
  const auto* hashed = std::get_if<HashedDirectory>(&directory_);
  const int64_t items = hashed != nullptr ? hashed->end() : items_->num_items();
  // Rows that a freeze copied aside, and the memory they leave to the next freeze, are not small beside the rows.
  const int64_t aside = frozen_ ? std::max(room_items_, frozen_->num_aside()) : room_items_;
  const auto of_a_row = static_cast<int64_t>(row_bytes()),
             beside_it = static_cast<int64_t>(slot_bytes() + step_bytes() + life_bytes());
  return {.rows = items * of_a_row,
          .slots = items * beside_it,
          .index = std::visit([](const auto& directory) { return directory.memory_bytes(); }, directory_),
          .snapshots = aside * (of_a_row + beside_it) +
                       (frozen_ && frozen_->num_aside() > 0 ? frozen_->index_bytes() : 0) + moments_.memory_bytes()};
}

void RowStore::require_legal(const int64_t* ids, int64_t count) const {
  std::visit(
      [&](const auto& directory) {
        for (int64_t i = 0; i < count; ++i)
          if (const auto reason = directory.objection(ids[i])) throw Refusal{*reason, i};
      },
      directory_);
}

void RowStore::write_initial(char* row, int64_t id, float* buffer) const {
  if (spec_.dtype == DType::float32 && reinterpret_cast<uintptr_t>(row) % alignof(float) == 0) {
    spec_.initial.fill(reinterpret_cast<float*>(row), spec_.dim, id);
    return;
  }
  spec_.initial.fill(buffer, spec_.dim, id);
  kernels().store[static_cast<int>(spec_.dtype)](row, buffer, static_cast<size_t>(spec_.dim));
}

void RowStore::reserve(const std::vector<int64_t>& missing) {
  if (missing.empty()) return;
  NewMemory news;
  const std::vector<int64_t> positions =
      std::visit([&](auto& directory) { return directory.positions_for(missing); }, directory_);
  std::optional<DenseItems::Growth> growth;
  if (items_ != nullptr)
    growth.emplace(*items_).take(positions, [&](int64_t item) { ensure_item(item, news); });
  else
    for (int64_t position : positions) ensure_item(position, news);
  for (int64_t position : positions) moments_.written().ensure(position);
  std::visit([&](auto& directory) { directory.reserve(static_cast<int64_t>(missing.size()), news); }, directory_);
  news.keep();
  if (growth)
    growth->keep([this](int64_t to, int64_t from) { copy_item(to, from); }, [this](int64_t item) { clear_item(item); });
}

void RowStore::ensure_item(int64_t item, NewMemory& news) {
  rows_.ensure(item, &news);
  if (slots_) slots_->ensure(item, &news);
  if (row_steps_) row_steps_->ensure(item, &news);
  if (lives_) lives_->ensure(item, &news);
}

void RowStore::copy_item(int64_t to, int64_t from) {
  std::memcpy(rows_.at(to), rows_.at(from), row_bytes());
  if (slots_) std::memcpy(slots_->at(to), slots_->at(from), slot_bytes());
  if (row_steps_) row_step(to) = row_step(from);
  if (lives_) life_at(to) = life_at(from);
}

// Zeroes an item, as memory that was never written.
void RowStore::clear_item(int64_t item) {
  if (slots_) std::memset(slots_->at(item), 0, slot_bytes());
  if (row_steps_) row_step(item) = 0;
  if (lives_) life_at(item) = {};
}

void RowStore::make_room(const int64_t* ids, int64_t count) {
  std::unique_lock lock(mutex_);
  require_legal(ids, count);
  std::vector<int64_t> missing;
  std::visit(
      [&](const auto& directory) {
        for (int64_t i = 0; i < count; ++i)
          if (directory.find(ids[i]) < 0) missing.push_back(ids[i]);
      },
      directory_);
  if (!missing.empty() && num_rows_there() + static_cast<int64_t>(missing.size()) > max_rows_) {
    Resolved found{std::vector<int64_t>(static_cast<size_t>(count)), std::move(missing), 0};
    find_all<Find::position>(directory_, ids, count, found.positions.data(), [](int64_t, int64_t) {});
    make_way(found);
    missing = std::move(found.missing);
  }
  reserve(missing);
}

void RowStore::make_room_to_keep(int64_t count) {
  std::unique_lock lock(mutex_);
  reserve_step();
  count += rows_of_a_sweep(num_rows_there() + count);  // the end of the step writes the sweep's rows
  if (frozen_) frozen_->reserve(std::min(count, frozen_->only_in_place()));
}

// Creates a row for every id whose position is -1, with its initial value unless `buffer` (of which it uses [0, D)) is
// null; room is reserved. Returns the number of created rows.
int64_t RowStore::create_missing(const int64_t* ids, int64_t* positions, int64_t count, float* buffer) {
  int64_t created = 0;
  std::visit(
      [&](auto& directory) {
        for (int64_t i = 0; i < count; ++i) {
          if (i + kBurst < count) directory.prefetch(ids[i + kBurst]);
          if (positions[i] >= 0) continue;
          const Placed placed = directory.insert(ids[i]);
          positions[i] = placed.position;
          if (placed.created && has_removed_) clear_item(item_at(placed.position));
          if (placed.created && buffer != nullptr) write_initial(rows_.at(item_at(placed.position)), ids[i], buffer);
          created += placed.created;
        }
      },
      directory_);
  return created;
}

// Makes sure that rows to be written (-1: a new one) can be recorded as written, and copies them aside for a freeze in
// progress. Throws std::bad_alloc, and then no row has changed.
void RowStore::before_writes(const std::vector<int64_t>& positions, Pauses* pauses) {
  for (int64_t position : positions)
    if (position >= 0) moments_.written().ensure(position);
  if (frozen_) copy_for_freeze(positions, pauses);
}

}  // namespace geartrain
