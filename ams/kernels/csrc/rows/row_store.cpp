#include "rows/row_store.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "admission/admitted_push.hpp"
#include "base/copy_row.hpp"
#include "machine/fan_out.hpp"
#include "machine/lookahead.hpp"
#include "rows/row_update.hpp"

namespace geartrain {
namespace {

// Finding many positions before touching any row is a tenth faster than finding each burst's own.
constexpr int64_t kFoundTogether = 4096;
constexpr uint64_t kAdmissionKey = 0x61646D697373696F;  // its hashes are not those of rounding

void copy_to_cache(char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); }

// A pull of more bytes than the caches hold writes past them; a smaller one stays in them for its reader.
constexpr size_t kStreamedBytes = size_t{24} << 20;

BucketRanks ranks_of(const std::vector<int64_t>& owned) {
  BucketRanks ranks;
  ranks.fill(-1);
  int16_t rank = 0;
  for (int64_t bucket : owned) ranks[static_cast<size_t>(bucket)] = rank++;
  return ranks;
}

int64_t item_bytes_of(const RowStoreSpec& spec) {
  return spec.dim * static_cast<int64_t>(item_bytes(spec.dtype)) + spec.slot_dim() * static_cast<int64_t>(item_bytes(spec.slot_dtype)) +
         (spec.counts_steps() || spec.counts_updates() ? static_cast<int64_t>(sizeof(int64_t)) : 0) +
         (spec.keeps_lives ? static_cast<int64_t>(sizeof(RowLife)) : 0);
}

Directory directory_for(const RowStoreSpec& spec) {
  const BucketRanks ranks = ranks_of(spec.owned_buckets);
  if (spec.num_rows < 0) return HashedDirectory(ranks);
  return DenseDirectory(ranks, spec.owned_buckets, spec.num_rows, item_bytes_of(spec));
}

DenseItems* items_of(Directory& directory) {
  auto* dense = std::get_if<DenseDirectory>(&directory);
  return dense != nullptr ? &dense->items() : nullptr;
}

enum class Find { position, item };

// found[i] = the position, or the item, of ids[i], or -1. Calls meanwhile(begin, end) for bursts of them, which has the time the
// index takes to arrive.
template <Find what, class Meanwhile>
void find_all(const Directory& any_directory, const int64_t* ids, int64_t count, int64_t* found, Meanwhile&& meanwhile) {
  std::visit(
      [&](const auto& directory) {
        for (int64_t i = 0; i < std::min(count, kBurst); ++i) directory.prefetch(ids[i]);
        for (int64_t begin = 0; begin < count; begin += kBurst) {
          const int64_t end = std::min(count, begin + kBurst), next = std::min(count, end + kBurst);
          for (int64_t i = end; i < next; ++i) directory.prefetch(ids[i]);
          meanwhile(begin, end);
          for (int64_t i = begin; i < end; ++i) {
            if constexpr (what == Find::item)
              found[i] = directory.find_item(ids[i]);
            else
              found[i] = directory.find(ids[i]);
          }
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

// Lets go of a store's lock for each pause: whoever has a turn in one reads rows, too.
template <class Lock>
class UnlockedPauses final : public Pauses {
 public:
  UnlockedPauses(Pauses* pauses, Lock& lock) : pauses_(pauses), lock_(lock) {}
  // Null: there are none.
  Pauses* get() { return pauses_ != nullptr ? this : nullptr; }
  bool are_wanted() override { return pauses_->are_wanted(); }
  void pause() noexcept override {
    lock_.unlock();
    pauses_->pause();
    lock_.lock();
  }

 private:
  Pauses* const pauses_;
  Lock& lock_;
};

}  // namespace

RowStore::RowStore(const RowStoreSpec& spec)
    : spec_(spec),
      num_slots_(spec.optimizer->num_slots()),
      slot_dim_(static_cast<size_t>(spec.slot_dim())),
      rounding_key_(rounding_key(spec.initial.seed, spec.initial.table_hash)),
      directory_(directory_for(spec)),
      items_(items_of(directory_)),
      rows_(spec.dim * static_cast<int64_t>(item_bytes(spec.dtype)), items_ != nullptr ? items_->most_items() : INT64_MAX),
      bounds_{rounded(static_cast<float>(spec.initial.bound()), spec.dtype), {}} {
  const int64_t most_items = items_ != nullptr ? items_->most_items() : INT64_MAX;
  if (spec.slot_dim() > 0) slots_.emplace(spec.slot_dim() * static_cast<int64_t>(item_bytes(spec.slot_dtype)), most_items);
  if (spec.counts_steps() || spec.counts_updates()) row_steps_.emplace(static_cast<int64_t>(sizeof(int64_t)), most_items);
  if (spec.counts_steps()) steps_.emplace(*spec.optimizer->drift());
  if (spec.admission.kind != AdmissionSpec::Kind::all) {
    spec_.admission.key = splitmix64(rounding_key_ ^ kAdmissionKey);
    spec_.admission.is_dense = spec.num_rows >= 0;
    spec_.admission.owned_share = static_cast<double>(spec.owned_buckets.size()) / kNumBuckets;
    admission_.emplace(spec_.admission);
  }
  if (spec.keeps_lives) lives_.emplace(static_cast<int64_t>(sizeof(RowLife)), most_items);
  if (spec.max_bytes >= 0) most_rows_ = most_rows_within(spec.max_bytes);
}

int64_t RowStore::num_present() const {
  std::shared_lock lock(mutex_);
  return num_rows_there();
}

int64_t RowStore::memory_bytes() const {
  std::shared_lock lock(mutex_);
  const auto* hashed = std::get_if<HashedDirectory>(&directory_);
  const int64_t items = hashed != nullptr ? hashed->end() : items_->num_items();
  // What a freeze copied aside, and the memory it leaves to the next one, are not small beside the rows.
  const int64_t aside = frozen_ ? std::max(room_items_, frozen_->num_aside()) : room_items_;
  return (items + aside) * static_cast<int64_t>(row_bytes() + slot_bytes() + step_bytes() + life_bytes()) +
         (frozen_ && frozen_->num_aside() > 0 ? frozen_->index_bytes() : 0) + moments_.memory_bytes() +
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

void RowStore::pull(const int64_t* ids, int64_t count, const PullInto& out, Pauses* pauses) const {
  std::shared_lock lock(mutex_);
  UnlockedPauses unlocked(pauses, lock);
  require_legal(ids, count);
  const int64_t* positions = out.rows.positions;
  for (int64_t i = 0; positions != nullptr && i < count; ++i)
    if (positions[i] < 0 || positions[i] >= out.size) throw Refusal{Reason::bad_position, i};
  if (out.wire != spec_.dtype) require_within(out.wire, ids, count);
  const size_t total_bytes = static_cast<size_t>(count) * row_bytes();
  const bool is_streamed = total_bytes / item_bytes(spec_.dtype) * item_bytes(out.dtype) >= kStreamedBytes;
  fan_out(
      count, total_bytes, spec_.threads,
      [&](int64_t begin, int64_t end, int64_t) { pull_slice(ids, begin, end, out, is_streamed); },
      unlocked.get());
}

// Looks at every row only if the table may hold one that is too large.
void RowStore::require_within(DType wire, const int64_t* ids, int64_t count) const {
  DefaultFloatMode float_mode;
  Now now = this->now();
  if (now) now->reach_back(1);
  if (!bounds_lag_ && std::isfinite(rounded(bounds_at(now).row, wire))) return;
  std::vector<float> buffer(static_cast<size_t>(spec_.dim) * 4);
  std::vector<uint16_t> narrow(static_cast<size_t>(spec_.dim));
  const Kernels& k = kernels();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = std::visit([&](const auto& directory) { return directory.find_item(ids[i]); }, directory_);
    k.store[static_cast<int>(wire)](narrow.data(), wide_row(item, ids[i], now, buffer.data()), narrow.size());
    if (k.max_abs_bits[static_cast<int>(wire)](narrow.data(), narrow.size()) >= kInfinityBits) throw Refusal{Reason::beyond_wire, i};
  }
}

// Of a table of float32: the row of `item` (-1: the initial value of `id`), where it lies or in buffer [3D, 4D).
const float* RowStore::wide_row(int64_t item, int64_t id, const Now& now, float* buffer) const {
  float* made = buffer + 3 * spec_.dim;
  if (is_behind(now, item))
    pull_moved(reinterpret_cast<char*>(made), item, id, *now, buffer);
  else if (item < 0)
    write_initial(reinterpret_cast<char*>(made), id, buffer);
  else
    return reinterpret_cast<const float*>(rows_.at(item));
  return made;
}

void RowStore::pull_slice(const int64_t* ids, int64_t first, int64_t last, const PullInto& out, bool streamed) const {
  DefaultFloatMode float_mode;
  const size_t dim = static_cast<size_t>(spec_.dim), bytes = row_bytes(), out_bytes = dim * item_bytes(out.dtype);
  const bool is_rounded = out.wire != spec_.dtype;
  std::vector<float> buffer(dim * 4);
  std::vector<uint16_t> narrow(is_rounded ? dim : 0);
  const Kernels& k = kernels();
  const auto store = k.store[static_cast<int>(out.wire)];
  const auto load = k.load[static_cast<int>(out.wire)];
  const auto pull_row = [&](char* row, int64_t item, int64_t id, const Now& now) {
    if (is_behind(now, item))
      pull_moved(row, item, id, *now, buffer.data());
    else if (item < 0)
      write_initial(row, id, buffer.data());
    else if (streamed)
      k.copy_streaming(row, rows_.at(item), bytes);
    else
      copy_row(row, rows_.at(item), bytes);
  };
  const auto pull_rounded = [&](char* row, int64_t item, int64_t id, const Now& now) {
    const float* wide = wide_row(item, id, now, buffer.data());
    if (out.dtype == out.wire && !streamed) return store(row, wide, dim);
    store(narrow.data(), wide, dim);
    if (out.dtype == out.wire)
      k.copy_streaming(row, reinterpret_cast<const char*>(narrow.data()), out_bytes);
    else
      load(reinterpret_cast<float*>(row), narrow.data(), dim);
  };
  const Lookahead lookahead;
  int64_t items[kFoundTogether];
  Now now = this->now();
  for (int64_t begin = first; begin < last; begin += kFoundTogether) {
    const int64_t size = std::min(kFoundTogether, last - begin);
    find_all<Find::item>(directory_, ids + begin, size, items, [](int64_t, int64_t) {});
    reach_back(now, items, size);
    lookahead.each(
        size, now ? bytes + slot_bytes() : bytes,
        [&](int64_t i) {
          if (now)
            ask_for(lookahead, Use::read, items[i]);
          else if (items[i] >= 0)
            lookahead.ask(Use::read, rows_.at(items[i]), bytes);
        },
        [&](int64_t i) {
          char* row = out.rows.at(begin + i, out_bytes);
          if (is_rounded)
            pull_rounded(row, items[i], ids[begin + i], now);
          else
            pull_row(row, items[i], ids[begin + i], now);
          if (out.present != nullptr) out.present[out.rows.number(begin + i)] = items[i] >= 0;
        });
  }
  finish_streaming();
}

// Finds every id and, while the index lines travel, looks at the values beside the ids.
RowStore::Resolved RowStore::resolve(const int64_t* ids, int64_t count, const RowPlaces<const char>& values, DType dtype,
                                     Pauses* pauses) const {
  Resolved found;
  found.positions.resize(static_cast<size_t>(count));
  const size_t bytes = static_cast<size_t>(spec_.dim) * item_bytes(dtype);
  const auto max_abs_bits = kernels().max_abs_bits[static_cast<int>(dtype)];
  std::vector<uint32_t> largest(static_cast<size_t>(spec_.threads), 0);
  const auto look = [&](int64_t begin, int64_t end, int64_t thread) {
    uint32_t seen = 0;
    find_all<Find::position>(directory_, ids + begin, end - begin, found.positions.data() + begin, [&](int64_t from, int64_t to) {
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

// As memory is that was never written.
void RowStore::clear_item(int64_t item) {
  if (slots_) std::memset(slots_->at(item), 0, slot_bytes());
  if (row_steps_) row_step(item) = 0;
  if (lives_) life_at(item) = {};
}

void RowStore::ask_for(const Lookahead& lookahead, Use use, int64_t item) const {
  if (item < 0) return;
  lookahead.ask(use, rows_.at(item), row_bytes());
  if (slots_) lookahead.ask(use, slots_->at(item), slot_bytes());
  if (use == Use::update && row_steps_ && !steps_) lookahead.ask(use, row_steps_->at(item), step_bytes());
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

void RowStore::check_push(const int64_t* ids, int64_t count, const Gradients& gradients, DType dtype, const PushStep& step) const {
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
  if (!missing.empty() && num_rows_there() + static_cast<int64_t>(missing.size()) > most_rows_) {
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
  count += rows_of_a_sweep(num_rows_there() + count);  // the end of the step writes rows of its own
  if (frozen_) frozen_->reserve(std::min(count, frozen_->only_in_place()));
}

int64_t RowStore::push(const int64_t* ids, int64_t count, const Gradients& all_gradients, DType dtype, const PushStep& step,
                       bool ends_step, Pauses* pauses, const RowPlaces<char>* all_after) {
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
  const Lookahead lookahead;
  const auto copy = static_cast<size_t>(count) * row_bytes() >= kStreamedBytes ? kernels().copy_streaming : copy_to_cache;
  const auto update = [&](int64_t begin, int64_t end, int64_t thread) {
    DefaultFloatMode slice_float_mode;
    float* buffer = buffers.data() + thread * buffer_size;
    int64_t items[kMostAhead];
    Magnitudes seen = bounds[static_cast<size_t>(thread)];  // not in place: the threads would write to one cache line
    lookahead.each(
        end - begin, row_bytes() + slot_bytes(),
        [&](int64_t i) { ask_for(lookahead, Use::update, items[i % kMostAhead] = item_at(positions[begin + i])); },
        [&](int64_t i) {
          const int64_t item = items[i % kMostAhead];
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

// Creates the rows that are missing and calls write(begin, end, thread) for slices of all. A row that was missing is created and
// written between the same two pauses. Returns how many were created. Room is reserved; see create_missing for `buffer`.
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

// Gives every id whose position is -1 a row, with its initial value unless `buffer` (of which it uses [0, D)) is null; room is
// reserved. Returns how many were created.
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

bool RowStore::none_overflows(float largest_gradient, const PushStep& step, const Now& now) const {
  const Magnitudes most = step.optimizer.worst(largest_gradient, static_cast<size_t>(spec_.dim), step.factors, bounds_at(now));
  const auto fits = [this](float slot) { return std::isfinite(rounded(slot, spec_.slot_dtype)); };
  return std::isfinite(rounded(most.row, spec_.dtype)) && std::all_of(most.slots.begin(), most.slots.end(), fits);
}

// Near the end of a storage type's range: computes every row aside and refuses the push if one would become infinite.
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
    k.load[static_cast<int>(dtype)](gradient.data(), gradients.at(static_cast<int64_t>(i), dim * item_bytes(dtype)), dim);
    update_row(step.optimizer, now ? &*now : nullptr, ranges(), row.data(), slot.data(), gradient.data(), dim, step.factors,
               number_of(item));
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
  const RowUpdate update = update_row(step.optimizer, now ? &*now : nullptr, ranges(), weights, slots, direction, dim, step.factors,
                                      number_of(item));
  if (row_steps_) row_step(item) = update.number;
  bounds.raise_to(update.largest, num_slots_);
  const Part row_part = update.is_late ? Part::late_row : Part::row, slot_part = update.is_late ? Part::late_slot : Part::slot;
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
  make_way(found);
  reserve(found.missing);
  before_writes(found.positions, unlocked.get());
  bounds_.row = std::max(bounds_.row, std::bit_cast<float>(found.largest));
  const int64_t* positions = found.positions.data();
  const std::optional<int64_t> number = number_when_assigned();
  const Lookahead lookahead;
  const auto write = [&](int64_t begin, int64_t end, int64_t) {
    lookahead.each(
        end - begin, row_bytes() + slot_bytes(),
        [&](int64_t i) { ask_for(lookahead, Use::update, item_at(positions[begin + i])); },
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

// Makes sure that rows that are about to be written (-1: one that is not there yet) can be noted as written, and keeps what
// they were for a freeze under way. Throws std::bad_alloc, and then no row has changed.
void RowStore::before_writes(const std::vector<int64_t>& positions, Pauses* pauses) {
  for (int64_t position : positions)
    if (position >= 0) moments_.written().ensure(position);
  if (frozen_) keep_aside(positions, pauses);
}

}  // namespace geartrain
