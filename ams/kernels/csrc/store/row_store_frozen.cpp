// Part of a row store: rows as of a moment, for snapshots and exports, and their restore.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "machine/fan_out.hpp"
#include "machine/lookahead.hpp"
#include "store/row_store.hpp"
#include "rows/row_update.hpp"

namespace geartrain {
namespace {

constexpr int64_t kMaxLookedAt = int64_t{1} << 17;  // frozen rows visited in about a millisecond

// Some of the rows to be restored.
struct RestoredRows {
  RestoredRows() = default;
  RestoredRows(const std::vector<size_t>& chosen, const int64_t* all_ids, std::pair<const char*, size_t> all_rows,
               std::pair<const char*, size_t> all_slots, const int64_t* all_steps, const RowLife* all_lives) {
    const auto append = [](std::vector<char>& to, std::pair<const char*, size_t> from, size_t i) {
      if (from.first != nullptr) to.insert(to.end(), from.first + i * from.second, from.first + (i + 1) * from.second);
    };
    for (size_t i : chosen) {
      ids.push_back(all_ids[i]);
      append(rows, all_rows, i);
      append(slots, all_slots, i);
      if (all_steps != nullptr) steps.push_back(all_steps[i]);
      if (all_lives != nullptr) lives.push_back(all_lives[i]);
    }
  }

  std::vector<int64_t> ids, steps;
  std::vector<char> rows, slots;
  std::vector<RowLife> lives;
};

}  // namespace

void RowStore::copy_for_freeze(const std::vector<int64_t>& positions, Pauses* pauses) {
  int64_t count = 0;
  for (int64_t position : positions) count += position >= 0 && frozen_->is_only_in_place(position);
  frozen_->reserve(count);
  const Lookahead lookahead(Use::read);
  const auto keep = [&](int64_t begin, int64_t end, int64_t) {
    lookahead.each(
        end - begin, row_bytes() + slot_bytes(),
        [&](int64_t i) { ask_for(lookahead, item_at(positions[static_cast<size_t>(begin + i)])); },
        [&](int64_t i) {
          const int64_t position = positions[static_cast<size_t>(begin + i)];
          if (position < 0 || !frozen_->is_only_in_place(position)) return;
          const int64_t item = item_at(position);
          frozen_->copy_for_freeze(position, {{rows_.at(item), row_bytes()},
                                         {slots_ ? slots_->at(item) : nullptr, slot_bytes()},
                                         {row_steps_ ? row_steps_->at(item) : nullptr, step_bytes()},
                                         {lives_ ? lives_->at(item) : nullptr, life_bytes()}});
        });
  };
  fan_out(static_cast<int64_t>(positions.size()), positions.size() * (row_bytes() + slot_bytes()), 1, keep, pauses);
}

int64_t RowStore::freeze(std::optional<int64_t> since) {
  std::unique_lock lock(mutex_);
  Bits members = since ? moments_.since(*since)
                       : std::visit([](const auto& directory) { return directory.present(); }, directory_);
  std::vector<int64_t> removed = since ? moments_.removed_since(*since) : std::vector<int64_t>();
  std::optional<Admission::State> counted;
  if (admission_) counted = admission_->state();
  if (!room_) room_.emplace(static_cast<int64_t>(aside_bytes() + sizeof(int64_t)), INT64_MAX);
  frozen_.emplace(std::move(members), std::move(*room_));
  room_.reset();
  try {
    frozen_at_ = moments_.note();
  } catch (const std::bad_alloc&) {
    frozen_.reset();
    throw;
  }
  frozen_->removed() = std::move(removed);
  frozen_admission_ = std::move(counted);
  return frozen_->num_members();
}

int64_t RowStore::record_moment() {
  std::unique_lock lock(mutex_);
  return moments_.note();
}

int64_t RowStore::latest_moment() const {
  std::shared_lock lock(mutex_);
  return moments_.latest();
}

bool RowStore::knows_moment(int64_t moment) const {
  std::shared_lock lock(mutex_);
  return moments_.knows(moment);
}

void RowStore::forget_moment(int64_t moment) {
  std::unique_lock lock(mutex_);
  moments_.forget(moment);
}

bool RowStore::is_frozen() const {
  std::shared_lock lock(mutex_);
  return frozen_.has_value();
}

// Returns the bucket of a member of the freeze.
template <class AnyDirectory>
int64_t RowStore::frozen_id(const AnyDirectory& directory, int64_t position, const char* aside) const {
  const int64_t removed = aside == nullptr ? -1 : FrozenRows::id_aside(aside, aside_bytes());
  return removed < 0 ? directory.id_at(position) : removed;
}

int64_t RowStore::read_frozen(int64_t most, const uint8_t* buckets, int64_t* ids, char* rows, char* slots,
                              int64_t* steps, RowLife* lives) {
  std::unique_lock lock(mutex_);
  if (!frozen_) return -1;
  frozen_->want(buckets);
  int64_t count = 0, left = kMaxLookedAt;
  while (count < most) {
    const int64_t position = std::visit(
        [&](const auto& directory) {
          const auto bucket_at = [&](int64_t at) {
            return directory.bucket_of(
                frozen_id(directory, at, frozen_->is_only_in_place(at) ? nullptr : frozen_->aside(at)));
          };
          return frozen_->next(bucket_at, left);
        },
        directory_);
    if (position == FrozenRows::kOver && count == 0) return -1;
    if (position < 0) break;
    const char* aside = frozen_->aside(position);
    const int64_t item = item_at(position);
    ids[count] = std::visit([&](const auto& directory) { return frozen_id(directory, position, aside); }, directory_);
    std::memcpy(rows + static_cast<size_t>(count) * row_bytes(), aside != nullptr ? aside : rows_.at(item),
                row_bytes());
    if (slots_ && slots != nullptr)
      std::memcpy(slots + static_cast<size_t>(count) * slot_bytes(),
                  aside != nullptr ? aside + row_bytes() : slots_->at(item), slot_bytes());
    if (row_steps_ && steps != nullptr)
      std::memcpy(steps + count, aside != nullptr ? aside + row_bytes() + slot_bytes() : row_steps_->at(item),
                  step_bytes());
    if (lives_ && lives != nullptr)
      std::memcpy(lives + count,
                  aside != nullptr ? aside + row_bytes() + slot_bytes() + step_bytes() : lives_->at(item),
                  life_bytes());
    ++count;
  }
  return count;
}

void RowStore::thaw(bool kept) {
  std::unique_lock lock(mutex_);
  if (!frozen_) return;
  if (!kept) moments_.forget(frozen_at_);
  frozen_admission_.reset();
  const int64_t used = std::max(room_items_, frozen_->num_aside());
  room_ = frozen_->take_room();
  room_items_ = std::min(used, room_->capacity());
  frozen_.reset();
}

void RowStore::restore_admission(int64_t num_pushes, int64_t range, const char* bytes, int64_t num_waiting) {
  std::unique_lock lock(mutex_);
  if (admission_) admission_->restore(num_pushes, range, bytes, num_waiting);
}

int64_t RowStore::restore(const int64_t* ids, int64_t count, const char* rows, const char* slots, const int64_t* steps,
                          const RowLife* lives) {
  DefaultFloatMode float_mode;
  std::unique_lock lock(mutex_);
  require_legal(ids, count);
  Resolved found = resolve(ids, count, {rows}, spec_.dtype);
  const size_t dim = static_cast<size_t>(spec_.dim), slot_size = item_bytes(spec_.slot_dtype);
  const Optimizer& optimizer = *spec_.optimizer;
  Magnitudes largest{std::bit_cast<float>(found.largest), {}};
  for (int64_t i = 0; i < count; ++i) {
    bool is_finite =
        kernels().max_abs_bits[static_cast<int>(spec_.dtype)](row_of(rows, i, row_bytes()), dim) < kInfinityBits;
    const char* values = slots_ ? row_of(slots, i, slot_bytes()) : nullptr;
    for (int slot = 0; slot < optimizer.num_slots(); ++slot) {
      const size_t width = optimizer.slot_dim(slot, dim);
      const uint32_t bits = kernels().max_abs_bits[static_cast<int>(spec_.slot_dtype)](values, width);
      values += width * slot_size;
      is_finite = is_finite && bits < kInfinityBits;
      float& seen = largest.slots[static_cast<size_t>(slot)];
      seen = std::max(seen, std::bit_cast<float>(bits));
    }
    if (!is_finite) throw Refusal{Reason::non_finite, i};
  }
  RestoredRows fitting;
  if (num_rows_there() + static_cast<int64_t>(found.missing.size()) > max_rows_) {
    fitting = RestoredRows(that_fit(ids, found, lives), ids, {rows, row_bytes()}, {slots, slot_bytes()}, steps, lives);
    count = static_cast<int64_t>(fitting.ids.size());
    ids = fitting.ids.data();
    rows = fitting.rows.data();
    slots = fitting.slots.data();
    steps = fitting.steps.data();
    lives = fitting.lives.data();
    found = resolve(ids, count, {rows}, spec_.dtype);
  }
  reserve(found.missing);
  std::vector<float> buffer(static_cast<size_t>(spec_.dim));
  if (frozen_) copy_for_freeze(found.positions);
  const int64_t created = found.missing.empty() ? 0 : create_missing(ids, found.positions.data(), count, buffer.data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = item_at(found.positions[static_cast<size_t>(i)]);
    std::memcpy(rows_.at(item), row_of(rows, i, row_bytes()), row_bytes());
    if (slots_) std::memcpy(slots_->at(item), row_of(slots, i, slot_bytes()), slot_bytes());
    if (row_steps_) row_step(item) = steps[i];
    if (lives_) life_at(item) = lives != nullptr ? lives[i] : RowLife{};
  }
  has_undated_ = has_undated_ || (lives_ && lives == nullptr);
  bounds_.raise_to(largest, num_slots_);
  return created;
}

}  // namespace geartrain
