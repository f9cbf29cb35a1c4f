// Part of a row store: reads rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/copy_row.hpp"
#include "machine/fan_out.hpp"
#include "machine/lookahead.hpp"
#include "store/find_all.hpp"
#include "store/row_store.hpp"
#include "store/unlocked_pauses.hpp"

namespace geartrain {
namespace {

// Finding many positions before reading any row was a tenth faster than burst by burst.
constexpr int64_t kFoundTogether = 4096;

}  // namespace

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

// Checks every row only if the table may hold one that is too large.
void RowStore::require_within(DType wire, const int64_t* ids, int64_t count) const {
  DefaultFloatMode float_mode;
  Now now = this->now();
  if (now) now->reach_back(1);
  if (!bounds_lag_ && std::isfinite(rounded_to_nearest(bounds_at(now).row, wire))) return;
  std::vector<float> buffer(static_cast<size_t>(spec_.dim) * 4);
  std::vector<uint16_t> narrow(static_cast<size_t>(spec_.dim));
  const Kernels& k = kernels();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = std::visit([&](const auto& directory) { return directory.find_item(ids[i]); }, directory_);
    k.store[static_cast<int>(wire)](narrow.data(), wide_row(item, ids[i], now, buffer.data()), narrow.size());
    if (k.max_abs_bits[static_cast<int>(wire)](narrow.data(), narrow.size()) >= kInfinityBits)
      throw Refusal{Reason::beyond_wire, i};
  }
}

// For a table of float32: returns the row of `item` (-1: the initial value of `id`), in place or in buffer [3D, 4D).
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
  const Lookahead lookahead(Use::read);
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
            ask_for(lookahead, items[i]);
          else if (items[i] >= 0)
            lookahead.ask(rows_.at(items[i]), bytes);
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

int64_t RowStore::state_width() const {
  if (spec_.counts_steps()) return 0;
  const size_t item = item_bytes(spec_.dtype), bytes = row_bytes() + (slots_ ? slot_bytes() : 0) + sizeof(int64_t);
  return static_cast<int64_t>((bytes + item - 1) / item);
}

void RowStore::pull_states(const int64_t* ids, int64_t count, const RowPlaces<char>& out) const {
  std::shared_lock lock(mutex_);
  DefaultFloatMode float_mode;
  require_legal(ids, count);
  const size_t bytes = row_bytes(), slots = slots_ ? slot_bytes() : 0;
  const size_t state = static_cast<size_t>(state_width()) * item_bytes(spec_.dtype);
  std::vector<float> buffer(static_cast<size_t>(spec_.dim) * 4);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = std::visit([&](const auto& directory) { return directory.find_item(ids[i]); }, directory_);
    char* row = out.at(i, state);
    const int64_t number = item < 0 ? -1 : number_of(item);
    std::memset(row + bytes, 0, state - bytes);
    if (item < 0)
      write_initial(row, ids[i], buffer.data());
    else
      std::memcpy(row, rows_.at(item), bytes);
    if (item >= 0 && slots_) std::memcpy(row + bytes, slots_->at(item), slots);
    std::memcpy(row + bytes + slots, &number, sizeof number);
  }
}

}  // namespace geartrain
