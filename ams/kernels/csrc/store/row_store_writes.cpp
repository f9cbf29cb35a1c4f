// Part of a row store: push and assign. Values are checked and room is made first; after that nothing can fail.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "admission/admitted_push.hpp"
#include "base/copy_row.hpp"
#include "machine/fan_out.hpp"
#include "machine/lookahead.hpp"
#include "rows/row_update.hpp"
#include "store/find_all.hpp"
#include "store/row_store.hpp"
#include "store/unlocked_pauses.hpp"

namespace geartrain {
namespace {

void copy_to_cache(char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace

// Finds every id and checks the values beside the ids while index lines are being fetched.
RowStore::Resolved RowStore::resolve(const int64_t* ids, int64_t count, const RowPlaces<const char>& values,
                                     DType dtype, Pauses* pauses) const {
  Resolved found;
  found.positions.resize(static_cast<size_t>(count));
  const size_t bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  const auto max_abs_bits = kernels().max_abs_bits[static_cast<int>(dtype)];
  std::vector<uint32_t> largest(static_cast<size_t>(spec_.threads), 0);
  const auto look = [&](int64_t begin, int64_t end, int64_t thread) {
    uint32_t seen = 0;
    find_all<Find::position>(
        directory_, ids + begin, end - begin, found.positions.data() + begin, [&](int64_t from, int64_t to) {
          const int64_t together = values.is_one_block() ? to - from : 1;
          for (int64_t i = from; i < to; i += together)
            seen = std::max(seen, max_abs_bits(values.at(begin + i, bytes), static_cast<size_t>(together * spec_.dim)));
        });
    largest[static_cast<size_t>(thread)] = std::max(largest[static_cast<size_t>(thread)], seen);
  };
  fan_out(count, static_cast<size_t>(count) * bytes, spec_.threads, look, pauses);
  found.largest = *std::max_element(largest.begin(), largest.end());
  for (int64_t i = 0; i < count; ++i)
    if (found.positions[static_cast<size_t>(i)] < 0) found.missing.push_back(ids[i]);
  return found;
}

RowStore::Resolved RowStore::resolve_push(const int64_t* ids, int64_t count, const Gradients& gradients, DType dtype,
                                          const PushStep& step, Now& now, Pauses* pauses) const {
  require_legal(ids, count);
  const size_t gradient_bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  Resolved found = resolve(ids, count, gradients, dtype, pauses);

  // float32 products are monotone: the largest one is finite only if all are.
  const float largest = std::fabs(std::bit_cast<float>(found.largest) * step.factors.scale);
  if (!std::isfinite(largest)) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = kernels().max_abs_bits[static_cast<int>(dtype)](gradients.at(i, gradient_bytes),
                                                                            static_cast<size_t>(spec_.dim));
      if (!std::isfinite(std::bit_cast<float>(bits) * step.factors.scale)) throw Refusal{Reason::non_finite, i};
    }
  }
  if (now) reach_back(now, items_at(found.positions).data(), count);
  if (count > 0 && !none_overflows(largest, step, now)) rehearse(ids, found, gradients, dtype, step, now);
  return found;
}

void RowStore::check_push(const int64_t* ids, int64_t count, const Gradients& gradients, DType dtype,
                          const PushStep& step) const {
  DefaultFloatMode float_mode;
  std::shared_lock lock(mutex_);
  Now now = this->now();
  resolve_push(ids, count, gradients, dtype, step, now);
}

bool RowStore::cannot_overflow(float largest, const PushStep& step) const {
  DefaultFloatMode float_mode;
  std::shared_lock lock(mutex_);
  const float product = std::fabs(largest * step.factors.scale);
  Now now = this->now();
  if (now) now->reach_back(1);
  return std::isfinite(product) && none_overflows(product, step, now);
}

void RowStore::ask_for(const Lookahead& lookahead, int64_t item) const {
  if (item < 0) return;
  lookahead.ask(rows_.at(item), row_bytes());
  if (slots_) lookahead.ask(slots_->at(item), slot_bytes());
  if (lookahead.use() == Use::update && row_steps_ && !steps_) lookahead.ask(row_steps_->at(item), step_bytes());
}

int64_t RowStore::push(const int64_t* ids, int64_t count, const Gradients& all_gradients, DType dtype,
                       const PushStep& step, bool ends_step, Pauses* pauses, const RowPlaces<char>* all_after) {
  DefaultFloatMode float_mode;
  std::unique_lock lock(mutex_);
  UnlockedPauses unlocked(pauses, lock);
  const size_t gradient_bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  Now now = this->now();
  Resolved found = resolve_push(ids, count, all_gradients, dtype, step, now, unlocked.get());
  AdmittedPush admitted;
  if (admission_ && !found.missing.empty())
    admitted = admit(*admission_, ids, step.batch, all_gradients, all_after, found.positions, found.missing);
  Gradients gradients = all_gradients;
  RowPlaces<char> rows_after = all_after != nullptr ? *all_after : RowPlaces<char>{};
  const RowPlaces<char>* const after = all_after != nullptr ? &rows_after : nullptr;
  const int64_t* const all_ids = ids;
  if (!admitted.is_all) {
    ids = admitted.ids.data();
    count = static_cast<int64_t>(admitted.ids.size());
    gradients.positions = admitted.gradients.data();
    rows_after.positions = admitted.rows.data();
  }
  std::vector<Magnitudes> bounds(static_cast<size_t>(spec_.threads), bounds_);
  const int64_t buffer_size = std::max(3 * spec_.dim, 2 * spec_.dim + spec_.slot_dim());
  std::vector<float> buffers(static_cast<size_t>(spec_.threads * buffer_size));
  before_writes(found.positions, unlocked.get());
  make_way(found);
  reserve(found.missing);
  reserve_step();
  const Overdue overdue = ends_step ? next_overdue(now) : Overdue{};
  before_writes(overdue.positions, unlocked.get());
  // From here on nothing can fail.
  if (admission_) admission_->count(admitted.decision);
  for (int64_t position : overdue.positions) moments_.written().set(position);
  const int64_t* positions = found.positions.data();
  const Lookahead lookahead(Use::update);
  const auto copy =
      static_cast<size_t>(count) * row_bytes() >= kStreamedBytes ? kernels().copy_streaming : copy_to_cache;
  const auto update = [&](int64_t begin, int64_t end, int64_t thread) {
    DefaultFloatMode slice_float_mode;
    float* buffer = buffers.data() + thread * buffer_size;
    int64_t items[kMaxAhead];
    Magnitudes seen = bounds[static_cast<size_t>(thread)];  // not in place: the threads would write to one cache line
    lookahead.each(
        end - begin, row_bytes() + slot_bytes(),
        [&](int64_t i) { ask_for(lookahead, items[i % kMaxAhead] = item_at(positions[begin + i])); },
        [&](int64_t i) {
          const int64_t item = items[i % kMaxAhead];
          update_one(item, ids[begin + i], gradients.at(begin + i, gradient_bytes), dtype, step, now, buffer, seen);
          if (after != nullptr) copy(after->at(begin + i, row_bytes()), rows_.at(item), row_bytes());
        });
    bounds[static_cast<size_t>(thread)] = seen;
    if (after != nullptr) finish_streaming();
  };
  bounds_lag_ = true;
  const int64_t created = write_blocks(ids, found, buffers.data(), update, unlocked.get());
  BatchFacts seen = step.batch;
  if (!admitted.is_all && seen.occurrences != nullptr) seen.occurrences = admitted.occurrences.data();
  note_seen(found.positions, seen, true);
  for (const int64_t i : admitted.refused) write_initial(all_after->at(i, row_bytes()), all_ids[i], buffers.data());
  if (ends_step) end_step(overdue, now, step.factors.lr, buffers.data());
  for (const Magnitudes& seen : bounds) bounds_.raise_to(seen, num_slots_);
  bounds_.row = rounded_up(bounds_.row, spec_.dtype);
  for (float& slot : bounds_.slots) slot = rounded_up(slot, spec_.slot_dtype);
  bounds_lag_ = false;
  return created;
}

// Creates the rows that are missing and calls write(begin, end, thread) for slices of all. A row that was missing is
// created and written between the same two pauses. Returns how many were created. Room is reserved; see create_missing
// for `buffer`.
template <class Write>
int64_t RowStore::write_blocks(const int64_t* ids, Resolved& found, float* buffer, const Write& write, Pauses* pauses) {
  const int64_t count = static_cast<int64_t>(found.positions.size());
  int64_t *positions = found.positions.data(), created = 0;
  const size_t bytes = 2 * row_bytes();
  if (found.missing.empty()) {
    for (int64_t i = 0; i < count; ++i) moments_.written().set(positions[i]);
    fan_out(count, static_cast<size_t>(count) * bytes, spec_.threads, write, pauses);
    return 0;
  }
  const size_t block_bytes = spec_.threads == 1 ? kBlockBytes : kFanOutBytes * static_cast<size_t>(spec_.threads);
  const int64_t block = pauses == nullptr ? count : std::max<int64_t>(1, static_cast<int64_t>(block_bytes / bytes));
  for (int64_t begin = 0; begin < count; begin += block) {
    if (begin > 0 && pauses->are_wanted()) pauses->pause();
    const int64_t size = std::min(block, count - begin);
    created += create_missing(ids + begin, positions + begin, size, buffer);
    for (int64_t i = begin; i < begin + size; ++i) moments_.written().set(positions[i]);
    fan_out(size, static_cast<size_t>(size) * bytes, spec_.threads,
            [&](int64_t from, int64_t to, int64_t thread) { write(begin + from, begin + to, thread); });
  }
  return created;
}

bool RowStore::none_overflows(float largest_gradient, const PushStep& step, const Now& now) const {
  const Magnitudes most =
      step.optimizer.worst(largest_gradient, static_cast<size_t>(spec_.dim), step.factors, bounds_at(now));
  const auto fits = [this](float slot) { return std::isfinite(rounded_to_nearest(slot, spec_.slot_dtype)); };
  return std::isfinite(rounded_to_nearest(most.row, spec_.dtype)) &&
         std::all_of(most.slots.begin(), most.slots.end(), fits);
}

// Near the end of a storage type's range: computes every row in a buffer and refuses the push if one becomes infinite.
void RowStore::rehearse(const int64_t* ids, const Resolved& found, const Gradients& gradients, DType dtype,
                        const PushStep& step, const Now& now) const {
  const size_t dim = static_cast<size_t>(spec_.dim), slot_dim = static_cast<size_t>(spec_.slot_dim());
  std::vector<float> row(dim), slot(slot_dim), gradient(dim), scratch(dim);
  std::vector<char> stored(std::max(dim, slot_dim) * sizeof(float));
  const Kernels& k = kernels();
  for (size_t i = 0; i < found.positions.size(); ++i) {
    const int64_t item = item_at(found.positions[i]);
    std::fill(slot.begin(), slot.end(), 0.0f);
    if (item >= 0) {
      k.load[static_cast<int>(spec_.dtype)](row.data(), rows_.at(item), dim);
      if (slots_) k.load[static_cast<int>(spec_.slot_dtype)](slot.data(), slots_->at(item), slot_dim);
    } else {
      write_initial(stored.data(), ids[i], scratch.data());
      k.load[static_cast<int>(spec_.dtype)](row.data(), stored.data(), dim);
    }
    k.load[static_cast<int>(dtype)](gradient.data(), gradients.at(static_cast<int64_t>(i), dim * item_bytes(dtype)),
                                    dim);
    update_row(step.optimizer, now ? &*now : nullptr, ranges(), row.data(), slot.data(), gradient.data(), dim,
               step.factors, number_of(item));
    const auto require_finite = [&](const std::vector<float>& values, DType type) {
      k.store[static_cast<int>(type)](stored.data(), values.data(), values.size());
      if (k.max_abs_bits[static_cast<int>(type)](stored.data(), values.size()) >= kInfinityBits)
        throw Refusal{Reason::overflow, static_cast<int64_t>(i)};
    };
    require_finite(row, spec_.dtype);
    require_finite(slot, spec_.slot_dtype);
  }
}

// Half types pass through float32 buffers: [0, D) row, then the slots, then [D] gradient.
void RowStore::update_one(int64_t item, int64_t id, const char* gradient, DType dtype, const PushStep& step,
                          const Now& now, float* buffer, Magnitudes& bounds) {
  const size_t dim = static_cast<size_t>(spec_.dim), slot_dim = slot_dim_;
  char *row = rows_.at(item), *slot = slots_ ? slots_->at(item) : nullptr;
  const Kernels& k = kernels();
  const int row_type = static_cast<int>(spec_.dtype), slot_type = static_cast<int>(spec_.slot_dtype);
  const bool wide_row = spec_.dtype == DType::float32;
  const bool wide_slot = spec_.slot_dtype == DType::float32 || slot == nullptr;
  float* weights = wide_row ? reinterpret_cast<float*>(row) : buffer;
  float* slots = wide_slot ? reinterpret_cast<float*>(slot) : buffer + dim;
  const float* direction = reinterpret_cast<const float*>(gradient);
  if (!wide_row) k.load[row_type](weights, row, dim);
  if (!wide_slot) k.load[slot_type](slots, slot, slot_dim);
  if (dtype != DType::float32) {
    k.load[static_cast<int>(dtype)](buffer + dim + slot_dim, gradient, dim);
    direction = buffer + dim + slot_dim;
  }
  const RowUpdate update = update_row(step.optimizer, now ? &*now : nullptr, ranges(), weights, slots, direction, dim,
                                      step.factors, number_of(item));
  if (row_steps_) row_step(item) = update.number;
  bounds.raise_to(update.largest, num_slots_);
  const Part row_part = update.is_late ? Part::late_row : Part::row,
             slot_part = update.is_late ? Part::late_slot : Part::slot;
  if (!wide_row) store_rounded(spec_.dtype, row, weights, dim, draw_of(id, update.number, row_part));
  if (!wide_slot) store_rounded(spec_.slot_dtype, slot, slots, slot_dim, draw_of(id, update.number, slot_part));
}

int64_t RowStore::assign(const int64_t* ids, int64_t count, const char* rows, Pauses* pauses) {
  DefaultFloatMode float_mode;
  std::unique_lock lock(mutex_);
  UnlockedPauses unlocked(pauses, lock);
  require_legal(ids, count);
  const size_t bytes = row_bytes();
  Resolved found = resolve(ids, count, {rows}, spec_.dtype, unlocked.get());
  if (found.largest >= kInfinityBits) {
    const auto max_abs_bits = kernels().max_abs_bits[static_cast<int>(spec_.dtype)];
    for (int64_t i = 0; i < count; ++i)
      if (max_abs_bits(row_of(rows, i, bytes), static_cast<size_t>(spec_.dim)) >= kInfinityBits)
        throw Refusal{Reason::non_finite, i};
  }
  before_writes(found.positions, unlocked.get());
  make_way(found);
  reserve(found.missing);
  bounds_.row = std::max(bounds_.row, std::bit_cast<float>(found.largest));
  const int64_t* positions = found.positions.data();
  const std::optional<int64_t> number = number_when_assigned();
  const Lookahead lookahead(Use::update);
  const auto write = [&](int64_t begin, int64_t end, int64_t) {
    lookahead.each(
        end - begin, row_bytes() + slot_bytes(),
        [&](int64_t i) { ask_for(lookahead, item_at(positions[begin + i])); },
        [&](int64_t i) {
          const int64_t item = item_at(positions[begin + i]);
          std::memcpy(rows_.at(item), row_of(rows, begin + i, bytes), bytes);
          if (slots_) std::memset(slots_->at(item), 0, static_cast<size_t>(slots_->item_bytes()));
          if (number) row_step(item) = *number;
        });
  };
  const int64_t created = write_blocks(ids, found, nullptr, write, unlocked.get());
  note_seen(found.positions, {}, false);
  return created;
}

}  // namespace geartrain
