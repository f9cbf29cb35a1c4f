#include "rows/row_store.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/fan_out.hpp"
#include "base/lookahead.hpp"

namespace geartrain {
namespace {

// Finding many positions before touching any row is a tenth faster than finding each burst's own.
constexpr int64_t kFoundTogether = 4096;

// A pull of more bytes than the caches hold writes past them; a smaller one stays in them for its reader.
constexpr size_t kStreamedBytes = size_t{24} << 20;

BucketRanks ranks_of(const std::vector<int64_t>& owned) {
  BucketRanks ranks;
  ranks.fill(-1);
  int16_t rank = 0;
  for (int64_t bucket : owned) ranks[static_cast<size_t>(bucket)] = rank++;
  return ranks;
}

Directory directory_for(const RowStoreSpec& spec) {
  const BucketRanks ranks = ranks_of(spec.owned_buckets);
  if (spec.num_rows < 0) return HashedDirectory(ranks);
  return DenseDirectory(ranks, spec.owned_buckets, spec.num_rows);
}

int64_t most_positions(const Directory& directory) {
  const auto* dense = std::get_if<DenseDirectory>(&directory);
  return dense != nullptr ? dense->num_positions() : INT64_MAX;
}

// positions[i] = position of ids[i], or -1. Calls meanwhile(begin, end) for bursts of them, which has the time the index takes
// to arrive.
template <class Meanwhile>
void find_positions(const Directory& any_directory, const int64_t* ids, int64_t count, int64_t* positions,
                    Meanwhile&& meanwhile) {
  std::visit(
      [&](const auto& directory) {
        for (int64_t i = 0; i < std::min(count, kBurst); ++i) directory.prefetch(ids[i]);
        for (int64_t begin = 0; begin < count; begin += kBurst) {
          const int64_t end = std::min(count, begin + kBurst), next = std::min(count, end + kBurst);
          for (int64_t i = end; i < next; ++i) directory.prefetch(ids[i]);
          meanwhile(begin, end);
          for (int64_t i = begin; i < end; ++i) positions[i] = directory.find(ids[i]);
        }
      },
      any_directory);
}

float rounded(float value, DType dtype) {
  uint32_t bits = 0;
  float back = 0;
  kernels().store[static_cast<int>(dtype)](&bits, &value, 1);
  kernels().load[static_cast<int>(dtype)](&back, &bits, 1);
  return back;
}

const char* row_of(const char* rows, int64_t index, size_t row_bytes) {
  return rows + static_cast<size_t>(index) * row_bytes;
}

}  // namespace

RowStore::RowStore(const RowStoreSpec& spec)
    : spec_(spec),
      rounding_key_(rounding_key(spec.initial.seed, spec.initial.table_hash)),
      directory_(directory_for(spec)),
      rows_(spec.dim * static_cast<int64_t>(item_bytes(spec.dtype)), most_positions(directory_)),
      bounds_{rounded(static_cast<float>(spec.initial.bound()), spec.dtype), 0.0f} {
  if (spec.rule != Rule::sgd)
    slots_.emplace(spec.slot_dim() * static_cast<int64_t>(item_bytes(spec.slot_dtype)), most_positions(directory_));
  if (spec.window > 0 || spec.counts_updates())
    row_steps_.emplace(static_cast<int64_t>(sizeof(int64_t)), most_positions(directory_));
  if (spec.window > 0) steps_.emplace(spec.momentum, spec.weight_decay);
}

int64_t RowStore::num_present() const {
  std::shared_lock lock(mutex_);
  return num_rows_there();
}

int64_t RowStore::memory_bytes() const {
  const int64_t present = num_present();
  std::shared_lock lock(mutex_);
  // What a freeze copied aside, and the memory it leaves to the next one, are not small beside the rows.
  const int64_t aside = frozen_ ? std::max(room_items_, frozen_->num_aside()) : room_items_;
  return (present + aside) * static_cast<int64_t>(row_bytes() + slot_bytes() + step_bytes()) +
         (frozen_ && frozen_->num_aside() > 0 ? frozen_->index_bytes() : 0) +
         std::visit([](const auto& directory) { return directory.memory_bytes(); }, directory_);
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

void RowStore::pull(const int64_t* ids, int64_t count, const PullInto& out) const {
  std::shared_lock lock(mutex_);
  require_legal(ids, count);
  for (int64_t i = 0; out.positions != nullptr && i < count; ++i)
    if (out.positions[i] < 0 || out.positions[i] >= out.size) throw Refusal{Reason::bad_position, i};
  const size_t total_bytes = static_cast<size_t>(count) * row_bytes();
  fan_out(count, total_bytes, spec_.threads, [&](int64_t begin, int64_t end, int64_t) {
    pull_slice(ids, begin, end, out, total_bytes >= kStreamedBytes);
  });
}

void RowStore::pull_slice(const int64_t* ids, int64_t first, int64_t last, const PullInto& out, bool streamed) const {
  DefaultFloatMode float_mode;
  std::vector<float> buffer(static_cast<size_t>(spec_.dim) * 3);
  const size_t bytes = row_bytes();
  const auto copy_streaming = kernels().copy_streaming;
  const Lookahead lookahead;
  int64_t found[kFoundTogether];
  std::optional<CatchUp> catch_up = new_catch_up();
  for (int64_t begin = first; begin < last; begin += kFoundTogether) {
    const int64_t size = std::min(kFoundTogether, last - begin);
    find_positions(directory_, ids + begin, size, found, [](int64_t, int64_t) {});
    if (catch_up) reach_back(*catch_up, found, size);
    lookahead.each(
        size, catch_up ? bytes + slot_bytes() : bytes,
        [&](int64_t i) {
          if (catch_up)
            ask_for(lookahead, Use::read, found[i]);
          else if (found[i] >= 0)
            lookahead.ask(Use::read, rows_.at(found[i]), bytes);
        },
        [&](int64_t i) {
          const int64_t target = out.positions != nullptr ? out.positions[begin + i] : begin + i;
          char* row = out.rows + static_cast<size_t>(target) * bytes;
          if (catch_up && catch_up->of(found[i] < 0 ? 0 : last_step(found[i])) != nullptr)
            pull_moved(row, found[i], ids[begin + i], *catch_up, buffer.data());
          else if (found[i] < 0)
            write_initial(row, ids[begin + i], buffer.data());
          else if (streamed)
            copy_streaming(row, rows_.at(found[i]), bytes);
          else
            std::memcpy(row, rows_.at(found[i]), bytes);
          if (out.present != nullptr) out.present[target] = found[i] >= 0;
        });
  }
  finish_streaming();
}

// Finds every id and, while the index lines travel, looks at the values beside the ids.
RowStore::Resolved RowStore::resolve(const int64_t* ids, int64_t count, const char* values, DType dtype) const {
  Resolved found;
  found.positions.resize(static_cast<size_t>(count));
  const size_t bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  const auto max_abs_bits = kernels().max_abs_bits[static_cast<int>(dtype)];
  std::vector<uint32_t> largest(static_cast<size_t>(spec_.threads), 0);
  fan_out(count, static_cast<size_t>(count) * bytes, spec_.threads, [&](int64_t begin, int64_t end, int64_t thread) {
    uint32_t seen = 0;
    find_positions(directory_, ids + begin, end - begin, found.positions.data() + begin, [&](int64_t from, int64_t to) {
      seen = std::max(seen, max_abs_bits(row_of(values, begin + from, bytes), static_cast<size_t>((to - from) * spec_.dim)));
    });
    largest[static_cast<size_t>(thread)] = std::max(largest[static_cast<size_t>(thread)], seen);
  });
  found.largest = *std::max_element(largest.begin(), largest.end());
  for (int64_t i = 0; i < count; ++i)
    if (found.positions[static_cast<size_t>(i)] < 0) found.missing.push_back(ids[i]);
  return found;
}

void RowStore::reserve(const std::vector<int64_t>& missing) {
  if (missing.empty()) return;
  NewMemory news;
  const std::vector<int64_t> positions =
      std::visit([&](auto& directory) { return directory.positions_for(missing, news); }, directory_);
  for (int64_t position : positions) {
    rows_.ensure(position, &news);
    if (slots_) slots_->ensure(position, &news);
    if (row_steps_) row_steps_->ensure(position, &news);
    ensure_touchable(position);
  }
  std::visit([&](auto& directory) { directory.reserve(static_cast<int64_t>(missing.size())); }, directory_);
  news.keep();
}

Placed RowStore::place(int64_t id) {
  return std::visit([id](auto& directory) { return directory.insert(id); }, directory_);
}

void RowStore::ask_for(const Lookahead& lookahead, Use use, int64_t position) const {
  if (position < 0) return;
  lookahead.ask(use, rows_.at(position), row_bytes());
  if (slots_) lookahead.ask(use, slots_->at(position), slot_bytes());
  if (use == Use::update && spec_.counts_updates()) lookahead.ask(use, row_steps_->at(position), step_bytes());
}

RowStore::Resolved RowStore::resolve_push(const int64_t* ids, int64_t count, const char* values, DType dtype,
                                          StepFactors factors, CatchUp* catch_up) const {
  require_legal(ids, count);
  const size_t gradient_bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  Resolved found = resolve(ids, count, values, dtype);

  // float32 products are monotone: the largest one is finite only if all are.
  const float largest = std::fabs(std::bit_cast<float>(found.largest) * factors.scale);
  if (!std::isfinite(largest)) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = kernels().max_abs_bits[static_cast<int>(dtype)](row_of(values, i, gradient_bytes),
                                                                            static_cast<size_t>(spec_.dim));
      if (!std::isfinite(std::bit_cast<float>(bits) * factors.scale)) throw Refusal{Reason::non_finite, i};
    }
  }
  if (catch_up != nullptr) reach_back(*catch_up, found.positions.data(), count);
  const Bounds before = catch_up != nullptr ? caught_up_bounds(*catch_up) : bounds_;
  if (count > 0 && !cannot_overflow(largest, factors, before)) rehearse(ids, found, values, dtype, factors, catch_up);
  return found;
}

void RowStore::check_push(const int64_t* ids, int64_t count, const void* gradients, DType dtype, float lr, float scale) const {
  DefaultFloatMode float_mode;
  std::shared_lock lock(mutex_);
  std::optional<CatchUp> catch_up = new_catch_up();
  resolve_push(ids, count, static_cast<const char*>(gradients), dtype, {lr, scale, spec_.momentum, spec_.weight_decay},
               catch_up ? &*catch_up : nullptr);
}

bool RowStore::surely_takes(float largest, float lr, float scale) const {
  DefaultFloatMode float_mode;
  std::shared_lock lock(mutex_);
  const float product = std::fabs(largest * scale);
  std::optional<CatchUp> catch_up = new_catch_up();
  if (catch_up) catch_up->reach_back(1);
  return std::isfinite(product) && cannot_overflow(product, {lr, scale, spec_.momentum, spec_.weight_decay},
                                                   catch_up ? caught_up_bounds(*catch_up) : bounds_);
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
  reserve(missing);
}

void RowStore::make_room_to_keep(int64_t count) {
  std::unique_lock lock(mutex_);
  if (steps_) {  // the end of the step writes rows of its own
    steps_->reserve();
    count += rows_of_a_sweep(num_rows_there() + count);
  }
  if (frozen_) frozen_->reserve(std::min(count, frozen_->only_in_place()));
}

int64_t RowStore::push(const int64_t* ids, int64_t count, const void* gradients, DType dtype, float lr, float scale,
                       bool ends_step) {
  DefaultFloatMode float_mode;
  std::unique_lock lock(mutex_);
  const char* values = static_cast<const char*>(gradients);
  const size_t gradient_bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  const StepFactors factors{lr, scale, spec_.momentum, spec_.weight_decay};
  std::optional<CatchUp> catch_up = new_catch_up();
  Resolved found = resolve_push(ids, count, values, dtype, factors, catch_up ? &*catch_up : nullptr);
  reserve(found.missing);
  const bool ends = steps_ && ends_step;
  const Overdue overdue = ends ? next_overdue() : Overdue{};
  if (ends) steps_->reserve();
  if (ends) reach_back(*catch_up, overdue.positions.data(), static_cast<int64_t>(overdue.positions.size()));
  std::vector<Bounds> bounds(static_cast<size_t>(spec_.threads), bounds_);
  std::vector<float> buffers(static_cast<size_t>(spec_.threads * spec_.dim) * 3);
  before_writes(found.positions);
  before_writes(overdue.positions);
  // From here on nothing can fail.
  const int64_t created = found.missing.empty() ? 0 : create_missing(ids, found.positions, buffers.data());
  for (int64_t position : found.positions) touched_.set(position);
  for (int64_t position : overdue.positions) touched_.set(position);
  const int64_t* positions = found.positions.data();
  const Lookahead lookahead;
  fan_out(count, 2 * static_cast<size_t>(count) * row_bytes(), spec_.threads, [&](int64_t begin, int64_t end, int64_t thread) {
    DefaultFloatMode slice_float_mode;
    float* buffer = buffers.data() + thread * spec_.dim * 3;
    Bounds seen = bounds[static_cast<size_t>(thread)];  // not in place: the threads would write to one cache line
    lookahead.each(
        end - begin, row_bytes() + slot_bytes(), [&](int64_t i) { ask_for(lookahead, Use::update, positions[begin + i]); },
        [&](int64_t i) {
          const int64_t position = positions[begin + i];
          update_one(position, ids[begin + i], row_of(values, begin + i, gradient_bytes), dtype, factors,
                     catch_up ? &*catch_up : nullptr, buffer, seen);
        });
    bounds[static_cast<size_t>(thread)] = seen;
  });
  if (ends) {
    bring_up(overdue, *catch_up, buffers.data());
    steps_->end_step(lr);
  }
  for (const Bounds& seen : bounds)
    bounds_ = {std::max(bounds_.row, seen.row), std::max(bounds_.slot, seen.slot), std::max(bounds_.second, seen.second)};
  bounds_ = {rounded_up(bounds_.row, spec_.dtype), rounded_up(bounds_.slot, spec_.slot_dtype), bounds_.second};
  return created;
}

// Gives every id whose position is -1 a row with its initial value; room is reserved. Uses buffer [0, D). Returns how many were
// created.
int64_t RowStore::create_missing(const int64_t* ids, std::vector<int64_t>& positions, float* buffer) {
  int64_t created = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= 0) continue;
    const Placed placed = place(ids[i]);
    positions[i] = placed.position;
    if (placed.created) write_initial(rows_.at(placed.position), ids[i], buffer);
    created += placed.created;
  }
  return created;
}

// The update of one worst row: each float32 step is monotone in the magnitudes, so what is finite here is finite everywhere.
bool RowStore::cannot_overflow(float largest_gradient, StepFactors factors, Bounds bounds) const {
  if (spec_.rule == Rule::adam) return adam_cannot_overflow(largest_gradient, factors, bounds);
  const float direction = largest_gradient + factors.weight_decay * bounds.row;
  const float velocity = (steps_ ? 1.0f : factors.momentum) * bounds.slot + direction;  // late gradients meet all of the slot
  const float step = spec_.rule == Rule::sgd        ? direction
                     : spec_.rule == Rule::momentum ? velocity
                                                    : direction + factors.momentum * velocity;
  const float row = bounds.row + factors.lr * step;
  return std::isfinite(rounded(row, spec_.dtype)) &&
         (spec_.rule == Rule::sgd || std::isfinite(rounded(velocity, spec_.slot_dtype)));
}

// Loose for rows of float16, whose pushes are nearly always rehearsed: how far a row moves depends on its own second moments.
bool RowStore::adam_cannot_overflow(float largest_gradient, StepFactors factors, Bounds bounds) const {
  const AdamFactors most = adam_bounds(spec_.adam, factors);
  const float direction = largest_gradient + most.weight_decay * bounds.row;
  const float first = most.beta1 * bounds.slot + most.rest1 * direction;
  const float second = most.beta2 * bounds.second + most.rest2 * direction * direction;
  const float row = bounds.row + most.step_size * (first / most.epsilon);
  return std::isfinite(rounded(row, spec_.dtype)) && std::isfinite(first) && std::isfinite(second);
}

RowStore::Bounds RowStore::update_values(float* row, float* slot, const float* gradient, StepFactors factors,
                                         int64_t updates) const {
  const size_t dim = static_cast<size_t>(spec_.dim);
  if (spec_.rule == Rule::adam) {
    const AdamLargest largest =
        adam_update()(row, slot, slot + dim, gradient, dim, adam_factors(spec_.adam, factors, updates + 1));
    return {std::bit_cast<float>(largest.row), std::bit_cast<float>(largest.first), std::bit_cast<float>(largest.second)};
  }
  const Largest largest = kernels().update[static_cast<int>(spec_.rule)](row, slot, gradient, dim, factors);
  return {std::bit_cast<float>(largest.row), std::bit_cast<float>(largest.slot)};
}

// Near the end of a storage type's range: computes every row aside and refuses the push if one would become infinite.
void RowStore::rehearse(const int64_t* ids, const Resolved& found, const char* gradients, DType dtype,
                        StepFactors factors, const CatchUp* catch_up) const {
  const size_t dim = static_cast<size_t>(spec_.dim), slot_dim = static_cast<size_t>(spec_.slot_dim());
  std::vector<float> row(dim), slot(slot_dim), gradient(dim), scratch(dim);
  std::vector<char> stored(std::max(dim, slot_dim) * sizeof(float));
  const Kernels& k = kernels();
  for (size_t i = 0; i < found.positions.size(); ++i) {
    const int64_t position = found.positions[i];
    std::fill(slot.begin(), slot.end(), 0.0f);
    if (position >= 0) {
      k.load[static_cast<int>(spec_.dtype)](row.data(), rows_.at(position), dim);
      if (slots_) k.load[static_cast<int>(spec_.slot_dtype)](slot.data(), slots_->at(position), slot_dim);
    } else {
      write_initial(stored.data(), ids[i], scratch.data());
      k.load[static_cast<int>(spec_.dtype)](row.data(), stored.data(), dim);
    }
    if (const Elapsed* elapsed = catch_up ? catch_up->of(position < 0 ? 0 : last_step(position)) : nullptr)
      k.move(row.data(), slot.data(), dim, *elapsed, ranges());
    k.load[static_cast<int>(dtype)](gradient.data(), gradients + i * dim * item_bytes(dtype), dim);
    if (catch_up && is_late(position))
      k.add_late(row.data(), slot.data(), gradient.data(), dim, factors);
    else
      update_values(row.data(), slot.data(), gradient.data(), factors, updates_of(position));
    const auto require_finite = [&](const std::vector<float>& values, DType type) {
      k.store[static_cast<int>(type)](stored.data(), values.data(), values.size());
      if (k.max_abs_bits[static_cast<int>(type)](stored.data(), values.size()) >= kInfinityBits)
        throw Refusal{Reason::overflow, static_cast<int64_t>(i)};
    };
    require_finite(row, spec_.dtype);
    require_finite(slot, spec_.slot_dtype);
  }
}

// Half types pass through float32 buffers: [0, D) row, [D, 2D) slot, [2D, 3D) gradient. Slots of adam are float32.
void RowStore::update_one(int64_t position, int64_t id, const char* gradient, DType dtype, StepFactors factors,
                          const CatchUp* catch_up, float* buffer, Bounds& bounds) {
  const size_t dim = static_cast<size_t>(spec_.dim);
  char *row = rows_.at(position), *slot = slots_ ? slots_->at(position) : nullptr;
  const Kernels& k = kernels();
  const int row_type = static_cast<int>(spec_.dtype), slot_type = static_cast<int>(spec_.slot_dtype);
  const bool wide_row = spec_.dtype == DType::float32;
  const bool wide_slot = spec_.slot_dtype == DType::float32 || slot == nullptr;
  float* weights = wide_row ? reinterpret_cast<float*>(row) : buffer;
  float* velocity = wide_slot ? reinterpret_cast<float*>(slot) : buffer + dim;
  const float* direction = reinterpret_cast<const float*>(gradient);
  if (!wide_row) k.load[row_type](weights, row, dim);
  if (!wide_slot) k.load[slot_type](velocity, slot, dim);
  if (dtype != DType::float32) {
    k.load[static_cast<int>(dtype)](buffer + 2 * dim, gradient, dim);
    direction = buffer + 2 * dim;
  }
  const bool late = catch_up != nullptr && is_late(position);
  if (catch_up != nullptr) {
    if (const Elapsed* elapsed = catch_up->of(last_step(position))) k.move(weights, velocity, dim, *elapsed, ranges());
    last_step(position) = catch_up->now() + 1;
  }
  Bounds largest{};
  if (late) {
    const Largest added = k.add_late(weights, velocity, direction, dim, factors);
    largest = {std::bit_cast<float>(added.row), std::bit_cast<float>(added.slot)};
  } else {
    largest = update_values(weights, velocity, direction, factors, updates_of(position));
  }
  if (spec_.counts_updates()) ++row_step(position);
  const int64_t number = row_steps_ ? row_step(position) : 0;  // of this update, from 1; with a window of its step
  bounds = {std::max(bounds.row, largest.row), std::max(bounds.slot, largest.slot), std::max(bounds.second, largest.second)};
  if (!wide_row) store_rounded(spec_.dtype, row, weights, dim, draw_of(id, number, late ? Part::late_row : Part::row));
  if (!wide_slot) store_rounded(spec_.slot_dtype, slot, velocity, dim, draw_of(id, number, late ? Part::late_slot : Part::slot));
}

int64_t RowStore::assign(const int64_t* ids, int64_t count, const char* rows) {
  DefaultFloatMode float_mode;
  std::unique_lock lock(mutex_);
  require_legal(ids, count);
  const size_t bytes = row_bytes();
  Resolved found = resolve(ids, count, rows, spec_.dtype);
  if (found.largest >= kInfinityBits) {
    const auto max_abs_bits = kernels().max_abs_bits[static_cast<int>(spec_.dtype)];
    for (int64_t i = 0; i < count; ++i)
      if (max_abs_bits(row_of(rows, i, bytes), static_cast<size_t>(spec_.dim)) >= kInfinityBits)
        throw Refusal{Reason::non_finite, i};
  }
  reserve(found.missing);
  bounds_.row = std::max(bounds_.row, std::bit_cast<float>(found.largest));
  before_writes(found.positions);
  int64_t created = 0;
  int64_t* positions = found.positions.data();
  const Lookahead lookahead;
  lookahead.each(
      count, row_bytes() + slot_bytes(), [&](int64_t i) { ask_for(lookahead, Use::update, positions[i]); },
      [&](int64_t i) {
        if (positions[i] < 0) {
          const Placed placed = place(ids[i]);
          positions[i] = placed.position;
          created += placed.created;
        }
        touched_.set(positions[i]);
        std::memcpy(rows_.at(positions[i]), row_of(rows, i, bytes), bytes);
        if (slots_) std::memset(slots_->at(positions[i]), 0, static_cast<size_t>(slots_->item_bytes()));
        if (steps_) last_step(positions[i]) = steps_->moves_rows_at_rest() ? steps_->now() : kResting;
        if (spec_.rule == Rule::adam) row_step(positions[i]) = 0;  // others only round by it, and not twice alike
      });
  return created;
}

// Makes sure that rows that are about to be written (-1: one that is not there yet) can be noted as touched, and keeps what
// they were for a freeze under way. Throws std::bad_alloc, and then no row has changed.
void RowStore::before_writes(const std::vector<int64_t>& positions) {
  for (int64_t position : positions)
    if (position >= 0) ensure_touchable(position);
  if (frozen_) keep_aside(positions);
}

void RowStore::ensure_touchable(int64_t position) {
  touched_.ensure(position);
  if (frozen_) frozen_->touched_before().ensure(position);  // so that the two can be joined whatever happens
}

void RowStore::keep_aside(const std::vector<int64_t>& positions) {
  int64_t count = 0;
  for (int64_t position : positions) count += position >= 0 && frozen_->is_only_in_place(position);
  frozen_->reserve(count);
  const Lookahead lookahead;
  lookahead.each(
      static_cast<int64_t>(positions.size()), row_bytes() + slot_bytes(),
      [&](int64_t i) { ask_for(lookahead, Use::read, positions[static_cast<size_t>(i)]); },
      [&](int64_t i) {
        const int64_t position = positions[static_cast<size_t>(i)];
        if (position >= 0 && frozen_->is_only_in_place(position))
          frozen_->keep_aside(position, {{rows_.at(position), row_bytes()},
                                         {slots_ ? slots_->at(position) : nullptr, slot_bytes()},
                                         {row_steps_ ? row_steps_->at(position) : nullptr, step_bytes()}});
      });
}

int64_t RowStore::freeze(bool only_touched) {
  std::unique_lock lock(mutex_);
  Bits members = only_touched ? touched_.copy()
                              : std::visit([](const auto& directory) { return directory.present(); }, directory_);
  if (!room_) room_.emplace(static_cast<int64_t>(row_bytes() + slot_bytes() + step_bytes()), INT64_MAX);
  frozen_.emplace(std::move(members), std::move(*room_));
  room_.reset();
  std::swap(frozen_->touched_before(), touched_);
  return frozen_->num_members();
}

bool RowStore::is_frozen() const {
  std::shared_lock lock(mutex_);
  return frozen_.has_value();
}

int64_t RowStore::read_frozen(int64_t most, int64_t* ids, char* rows, char* slots, int64_t* steps) {
  std::unique_lock lock(mutex_);
  int64_t count = 0;
  while (frozen_ && count < most) {
    const int64_t position = frozen_->next();
    if (position < 0) break;
    const char* aside = frozen_->aside(position);
    ids[count] = std::visit([position](const auto& directory) { return directory.id_at(position); }, directory_);
    std::memcpy(rows + static_cast<size_t>(count) * row_bytes(), aside != nullptr ? aside : rows_.at(position), row_bytes());
    if (slots_)
      std::memcpy(slots + static_cast<size_t>(count) * slot_bytes(), aside != nullptr ? aside + row_bytes() : slots_->at(position),
                  slot_bytes());
    if (row_steps_)
      std::memcpy(steps + count, aside != nullptr ? aside + row_bytes() + slot_bytes() : row_steps_->at(position), step_bytes());
    ++count;
  }
  return count;
}

void RowStore::thaw(bool kept) {
  std::unique_lock lock(mutex_);
  if (!frozen_) return;
  if (!kept) {
    frozen_->touched_before().add(touched_);
    touched_ = std::move(frozen_->touched_before());
  }
  const int64_t used = std::max(room_items_, frozen_->num_aside());
  room_ = frozen_->take_room();
  room_items_ = std::min(used, room_->capacity());
  frozen_.reset();
}

int64_t RowStore::restore(const int64_t* ids, int64_t count, const char* rows, const char* slots, const int64_t* steps) {
  DefaultFloatMode float_mode;
  std::unique_lock lock(mutex_);
  require_legal(ids, count);
  Resolved found = resolve(ids, count, rows, spec_.dtype);
  uint32_t largest_slot = 0, largest_second = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto largest = [&](const char* values, DType dtype) {
      return kernels().max_abs_bits[static_cast<int>(dtype)](values, static_cast<size_t>(spec_.dim));
    };
    const char* slot = slots_ ? row_of(slots, i, slot_bytes()) : nullptr;
    const uint32_t first = slots_ ? largest(slot, spec_.slot_dtype) : 0;
    const uint32_t second = spec_.rule == Rule::adam ? largest(slot + slot_bytes() / 2, spec_.slot_dtype) : 0;
    if (std::max({largest(row_of(rows, i, row_bytes()), spec_.dtype), first, second}) >= kInfinityBits)
      throw Refusal{Reason::non_finite, i};
    largest_slot = std::max(largest_slot, first);
    largest_second = std::max(largest_second, second);
  }
  reserve(found.missing);
  std::vector<float> buffer(static_cast<size_t>(spec_.dim));
  if (frozen_) keep_aside(found.positions);
  const int64_t created = found.missing.empty() ? 0 : create_missing(ids, found.positions, buffer.data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = found.positions[static_cast<size_t>(i)];
    std::memcpy(rows_.at(position), row_of(rows, i, row_bytes()), row_bytes());
    if (slots_) std::memcpy(slots_->at(position), row_of(slots, i, slot_bytes()), slot_bytes());
    if (row_steps_) row_step(position) = steps[i];
  }
  bounds_ = {std::max(bounds_.row, std::bit_cast<float>(found.largest)), std::max(bounds_.slot, std::bit_cast<float>(largest_slot)),
             std::max(bounds_.second, std::bit_cast<float>(largest_second))};
  return created;
}

}  // namespace geartrain
