// Part of a row store: moves rows that no push touches, for an optimizer with a drift. Reading moves nothing: a pull
// computes a row's current value; the next push of the row, or the sweep for old rows, writes it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "store/row_store.hpp"

namespace geartrain {
namespace {

// A row is caught up at the latest half a window after its last step, in a sweep that takes about a quarter.
constexpr int64_t kOverdueShare = 2, kSweepShare = 4;

float as_bound(double value) { return value < largest_of(DType::float32) ? static_cast<float>(value) : INFINITY; }

}  // namespace

int64_t RowStore::num_rows_there() const {
  return std::visit([](const auto& directory) { return directory.size(); }, directory_);
}

int64_t RowStore::next_present(int64_t from) const {
  return std::visit([from](const auto& directory) { return directory.next_present(from); }, directory_);
}

// Prepares `now` for the age of these rows, which costs a memory access for each.
void RowStore::reach_back(Now& now, const int64_t* items, int64_t count) const {
  if (!now) return;
  constexpr int64_t kPrefetchDistance = 32;
  int64_t oldest = INT64_MAX;
  for (int64_t i = 0; i < count + kPrefetchDistance; ++i) {
    if (i < count && items[i] >= 0) prefetch_bytes(row_steps_->at(items[i]), 1);
    if (i < kPrefetchDistance || items[i - kPrefetchDistance] < 0) continue;
    const int64_t last = row_step(items[i - kPrefetchDistance]);
    if (last > 0) oldest = std::min(oldest, last);
  }
  if (oldest != INT64_MAX) now->reach_back(oldest);
}

std::vector<int64_t> RowStore::items_at(const std::vector<int64_t>& positions) const {
  std::vector<int64_t> items(positions.size());
  std::ranges::transform(positions, items.begin(), [this](int64_t position) { return item_at(position); });
  return items;
}

// Returns bounds of the rows that `now` can catch up, after that.
Magnitudes RowStore::bounds_at(const Now& now) const {
  if (!now) return bounds_;
  const Elapsed most = now->largest();
  const double row = bounds_.row, slot = bounds_.slots[0];
  return {as_bound(most.ww * row + most.wv * slot), {as_bound(most.vw * row + most.vv * slot)}};
}

// Returns the number of a row after an assign; none: it keeps its own, since rows whose number only seeds the rounding
// must not use the same random bits twice.
std::optional<int64_t> RowStore::number_when_assigned() const {
  if (steps_) return steps_->moves_rows_at_rest() ? steps_->now() : kResting;
  return spec_.optimizer->counts_updates() ? std::optional<int64_t>(0) : std::nullopt;
}

// Writes the row of `item` (-1: the initial value of `id`), caught up, as the table stores it. Uses buffer [0, 3D).
void RowStore::pull_moved(char* out, int64_t item, int64_t id, const CatchUp& catch_up, float* buffer) const {
  const size_t dim = static_cast<size_t>(spec_.dim);
  const Kernels& k = kernels();
  const auto load = k.load[static_cast<int>(spec_.dtype)], load_slot = k.load[static_cast<int>(spec_.slot_dtype)];
  float *weights = buffer + dim, *velocity = buffer + 2 * dim;
  const Elapsed* elapsed = catch_up.of(number_of(item));
  if (item < 0) {
    write_initial(out, id, buffer);
    std::fill_n(velocity, dim, 0.0f);
  } else {
    load_slot(velocity, slots_->at(item), dim);
  }
  load(weights, item < 0 ? out : rows_.at(item), dim);
  k.move_row(buffer, weights, velocity, dim, *elapsed, ranges());
  k.store[static_cast<int>(spec_.dtype)](out, buffer, dim);
}

// Returns how many of a table's `count` rows the sweep of one step visits.
int64_t RowStore::rows_of_a_sweep(int64_t count) const { return steps_ ? count * kSweepShare / spec_.window + 1 : 0; }

// Returns the next rows of the sweep that are old. After a sweep over all rows, no row needs steps older than half a
// window before the sweep began.
RowStore::Overdue RowStore::next_overdue(Now& catch_up) {
  if (!steps_) return {};
  const int64_t now = steps_->now();
  if (next_present(sweep_at_) < 0) {
    steps_->forget_before(sweep_began_ - spec_.window / kOverdueShare);
    sweep_at_ = 0;
    sweep_began_ = now;
  }
  Overdue overdue{{}, sweep_at_};
  for (int64_t left = rows_of_a_sweep(num_rows_there()); left > 0; --left) {
    const int64_t position = next_present(overdue.sweep_at);
    if (position < 0) break;
    overdue.sweep_at = position + 1;
    const int64_t last = row_step(item_at(position));
    if (last > 0 && last <= now - spec_.window / kOverdueShare) overdue.positions.push_back(position);
  }
  reach_back(catch_up, items_at(overdue.positions).data(), static_cast<int64_t>(overdue.positions.size()));
  return overdue;
}

// Cannot fail: room was made before.
void RowStore::end_step(const Overdue& overdue, const Now& now, float lr, float* buffer) {
  if (!now) return;
  bring_up(overdue, *now, buffer);
  steps_->end_step(lr);
}

// Catches up rows of the sweep that the current push did not touch.
void RowStore::bring_up(const Overdue& overdue, const CatchUp& catch_up, float* buffer) {
  const size_t dim = static_cast<size_t>(spec_.dim);
  const Kernels& k = kernels();
  const auto raise = [&](float& bound, DType dtype, const char* values) {
    const float largest = std::bit_cast<float>(k.max_abs_bits[static_cast<int>(dtype)](values, dim));
    bound = std::max(bound, largest);
    return largest != 0;
  };
  for (int64_t position : overdue.positions) {
    const int64_t item = item_at(position);
    if (row_step(item) > catch_up.now()) continue;
    char *row = rows_.at(item), *slot = slots_->at(item);
    k.load[static_cast<int>(spec_.dtype)](buffer, row, dim);
    k.load[static_cast<int>(spec_.slot_dtype)](buffer + dim, slot, dim);
    if (const Elapsed* elapsed = catch_up.of(row_step(item))) k.move(buffer, buffer + dim, dim, *elapsed, ranges());
    const int64_t id = std::visit([position](const auto& directory) { return directory.id_at(position); }, directory_);
    store_rounded(spec_.dtype, row, buffer, dim, draw_of(id, catch_up.now(), Part::row));
    store_rounded(spec_.slot_dtype, slot, buffer + dim, dim, draw_of(id, catch_up.now(), Part::slot));
    raise(bounds_.row, spec_.dtype, row);
    const bool moves = raise(bounds_.slots[0], spec_.slot_dtype, slot) || steps_->moves_rows_at_rest();
    row_step(item) = moves ? catch_up.now() : kResting;
  }
  sweep_at_ = overdue.sweep_at;
}

StepState RowStore::step_state() const {
  std::shared_lock lock(mutex_);
  return steps_->state();
}

void RowStore::adopt_steps(const StepState& state) {
  std::unique_lock lock(mutex_);
  steps_->adopt(state);
  sweep_at_ = 0;
  sweep_began_ = state.now;
}

}  // namespace geartrain
