#include "rows/array_update.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "machine/lookahead.hpp"
#include "rows/row_update.hpp"
#include "values/rounding.hpp"

namespace geartrain {

void gather_rows(const float* rows, int64_t dim, const int64_t* numbers, int64_t count, float* out) {
  const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
  const Lookahead lookahead(Use::read);
  lookahead.each(
      count, bytes, [&](int64_t i) { lookahead.ask(rows + numbers[i] * dim, bytes); },
      [&](int64_t i) { std::copy_n(rows + numbers[i] * dim, dim, out + i * dim); });
}

namespace {

// Whether a magnitude stays finite in a storage type. The bits of NaN are above those of infinity.
bool stays_finite(float value, DType dtype) {
  uint32_t stored = 0;
  float back = 0;
  kernels().store[static_cast<int>(dtype)](&stored, &value, 1);
  kernels().load[static_cast<int>(dtype)](&back, &stored, 1);
  return std::bit_cast<uint32_t>(back) < kInfinityBits;
}

Ranges ranges_of(const ArrayUpdate& given) { return {largest_of(given.dtype), largest_of(given.slot_dtype)}; }

}  // namespace

void read_rows(const ArrayUpdate& given, const int64_t* numbers, int64_t count, const CatchUp& catch_up, float* out) {
  DefaultFloatMode float_mode;
  const Kernels& k = kernels();
  const size_t width = static_cast<size_t>(given.dim);
  const size_t row_bytes = width * item_bytes(given.dtype), slot_bytes = width * item_bytes(given.slot_dtype);
  const int row_type = static_cast<int>(given.dtype), slot_type = static_cast<int>(given.slot_dtype);
  const Ranges ranges = ranges_of(given);
  std::vector<float> row(width), slot(width);
  std::vector<char> stored(row_bytes);
  const auto number_of = [&](int64_t i) { return static_cast<size_t>(numbers != nullptr ? numbers[i] : i); };
  const Lookahead lookahead(Use::read);
  lookahead.each(
      count, row_bytes + slot_bytes,
      [&](int64_t i) {
        lookahead.ask(given.rows + number_of(i) * row_bytes, row_bytes);
        lookahead.ask(given.slots + number_of(i) * slot_bytes, slot_bytes);
        lookahead.ask(given.steps + number_of(i), sizeof(int64_t));
      },
      [&](int64_t i) {
        const size_t at = number_of(i);
        float* target = out + i * given.dim;
        const Elapsed* elapsed = catch_up.of(given.steps[at]);
        k.load[row_type](elapsed != nullptr ? row.data() : target, given.rows + at * row_bytes, width);
        if (elapsed == nullptr) return;
        k.load[slot_type](slot.data(), given.slots + at * slot_bytes, width);
        k.move_row(target, row.data(), slot.data(), width, *elapsed, ranges);
        if (given.dtype == DType::float32) return;
        k.store[row_type](stored.data(), target, width);
        k.load[row_type](target, stored.data(), width);
      });
}

int64_t update_rows(const ArrayUpdate& given, const int64_t* numbers, int64_t count, const float* gradients,
                    const GivenStep& step) {
  DefaultFloatMode float_mode;
  const Kernels& k = kernels();
  const size_t width = static_cast<size_t>(given.dim), slot_width = step.optimizer.slot_dim(width);
  const size_t row_bytes = width * item_bytes(given.dtype), slot_bytes = slot_width * item_bytes(given.slot_dtype);
  const int row_type = static_cast<int>(given.dtype), slot_type = static_cast<int>(given.slot_dtype);
  const Ranges ranges = ranges_of(given);
  std::vector<float> row(width), slot(slot_width);
  int64_t refused = 0;
  const auto number_of = [&](int64_t i) { return static_cast<size_t>(numbers != nullptr ? numbers[i] : i); };
  const Lookahead lookahead(Use::update);
  lookahead.each(
      count, given.slots != nullptr ? row_bytes + slot_bytes : row_bytes,
      [&](int64_t i) {
        lookahead.ask(given.rows + number_of(i) * row_bytes, row_bytes);
        if (given.slots != nullptr) lookahead.ask(given.slots + number_of(i) * slot_bytes, slot_bytes);
        if (given.steps != nullptr) lookahead.ask(given.steps + number_of(i), sizeof(int64_t));
      },
      [&](int64_t i) {
        const size_t at = number_of(i);
        char *row_at = given.rows + at * row_bytes,
             *slot_at = given.slots != nullptr ? given.slots + at * slot_bytes : nullptr;
        const float* gradient = gradients + i * given.dim;
        k.load[row_type](row.data(), row_at, width);
        if (slot_at != nullptr) k.load[slot_type](slot.data(), slot_at, slot_width);
        const RowUpdate update = update_row(step.optimizer, step.catch_up, ranges, row.data(), slot.data(), gradient,
                                            width, step.push, given.steps != nullptr ? given.steps[at] : 0);
        const auto fits = [&](float largest) { return stays_finite(largest, given.slot_dtype); };
        const float* slots = update.largest.slots.data();
        const bool is_finite = stays_finite(update.largest.row, given.dtype) &&
                               std::all_of(slots, slots + step.optimizer.num_slots(), fits);
        if (!is_finite) {
          ++refused;
          return;
        }
        const int64_t id = given.ids != nullptr ? given.ids[i] : given.first_id + static_cast<int64_t>(at);
        const Part row_part = update.is_late ? Part::late_row : Part::row,
                   slot_part = update.is_late ? Part::late_slot : Part::slot;
        store_rounded(given.dtype, row_at, row.data(), width, {given.rounding_key, id, update.number, row_part});
        if (slot_at != nullptr)
          store_rounded(given.slot_dtype, slot_at, slot.data(), slot_width,
                        {given.rounding_key, id, update.number, slot_part});
        if (given.steps != nullptr) given.steps[at] = update.number;
      });
  return refused;
}

}  // namespace geartrain
