#include "client/prepared_write.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/text.hpp"
#include "routing/merge_route.hpp"
#include "values/kernels.hpp"

namespace geartrain {
CutIds::CutIds(const int64_t* ids, int64_t count, const Placement& placement, bool is_dense, bool every_shard) {
  if (placement.num_shards == 1) {
    parts_.push_back({0, ids, nullptr, count});
    return;
  }
  std::vector<int64_t> counts(static_cast<size_t>(placement.num_shards));
  ids_.reset(new int64_t[static_cast<size_t>(count)]);
  places_.reset(new int64_t[static_cast<size_t>(count)]);
  route(ids, count, placement.bucket_shards.data(), is_dense, placement.num_shards, places_.get(), counts.data(),
        ids_.get());
  int64_t begin = 0;
  for (int64_t shard = 0; shard < placement.num_shards; ++shard) {
    const int64_t part = counts[static_cast<size_t>(shard)];
    if (part > 0 || every_shard) parts_.push_back({shard, ids_.get() + begin, places_.get() + begin, part});
    begin += part;
  }
}

namespace {

constexpr size_t kStreamedBytes = size_t{24} << 20;  // more than the caches hold, as for memcpy and RowStore

// Copies row by row: copy(i, how). `other`: source or destination, the side that may be scattered.
template <class Other, class Copy>
void copy_each(const Other& other, int64_t count, size_t row_bytes, const Copy& copy) {
  if (row_bytes >= kLongRowBytes && static_cast<size_t>(count) * row_bytes >= kStreamedBytes) {
    for (int64_t i = 0; i < count; ++i) copy(i, kernels().copy_streaming);
    finish_streaming();
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) prefetch_bytes(other.at(i + kRowsAhead, row_bytes), std::min(row_bytes, kLongRowBytes));
    copy(i, [](char* to, const char* from, size_t bytes) { copy_row(to, from, bytes); });
  }
}

}  // namespace

void copy_rows(char* to, const RowPlaces<const char>& from, int64_t count, size_t row_bytes) {
  if (!from.is_one_block())
    copy_each(from, count, row_bytes, [&](int64_t i, const auto& copy) {
      copy(to + static_cast<size_t>(i) * row_bytes, from.at(i, row_bytes), row_bytes);
    });
  else if (count != 0)
    std::memcpy(to, from.first, static_cast<size_t>(count) * row_bytes);
}

void copy_rows(const RowPlaces<char>& to, const char* from, int64_t count, size_t row_bytes) {
  if (!to.is_one_block())
    copy_each(to, count, row_bytes, [&](int64_t i, const auto& copy) {
      copy(to.at(i, row_bytes), from + static_cast<size_t>(i) * row_bytes, row_bytes);
    });
  else if (count != 0)
    std::memcpy(to.first, from, static_cast<size_t>(count) * row_bytes);
}

void widen_rows(const RowPlaces<char>& to, const char* from, int64_t count, size_t dim, DType dtype) {
  const auto load = kernels().load[static_cast<int>(dtype)];
  const auto widen = [&](char* row, const void* narrow, size_t numbers) {
    load(reinterpret_cast<float*>(row), narrow, numbers);
  };
  if (to.is_one_block()) return widen(to.first, from, static_cast<size_t>(count) * dim);
  const size_t row_bytes = dim * sizeof(float);
  for (int64_t i = 0; i < count; ++i, from += dim * item_bytes(dtype)) {
    if (i + kRowsAhead < count) prefetch_bytes(to.at(i + kRowsAhead, row_bytes), std::min(row_bytes, kLongRowBytes));
    widen(to.at(i, row_bytes), from, dim);
  }
}

PreparedWrite::PreparedWrite(const TableFacts& table, const Placement& placement, const int64_t* ids,
                             const RowPlaces<const char>& rows, int64_t count, DType dtype, WriteSettings settings,
                             RowCheck check)
    : table_(table.name),
      dim_(table.dim),
      dtype_(dtype),
      rows_(rows),
      settings_(std::move(settings)),
      counts_occurrences_(table.counts_occurrences) {
  if (counts_occurrences_ && settings_.batch.occurrences != nullptr)
    occurrences_.assign(settings_.batch.occurrences, settings_.batch.occurrences + count);
  settings_.batch.occurrences = nullptr;
  if (check == RowCheck::finite) require_finite(ids, count);
  if (!settings_.is_assign && !settings_.are_distinct) merge(ids, count);
  if (check == RowCheck::finite && is_merged()) require_finite(ids, count);  // sums of finite numbers may be infinite
  if (check != RowCheck::none && !settings_.is_assign) require_finite_product(count);
  if (!settings_.is_assign && table.wire != table.dtype) round(ids, count, table.wire);
  num_rows_ = count;
  cut_.emplace(ids, count, placement, table.is_dense, settings_.every_shard);
  cut_occurrences();
}

// Orders occurrences by shard, as the ids.
void PreparedWrite::cut_occurrences() {
  if (std::ranges::all_of(occurrences_, [](uint32_t count) { return count == 1; })) return occurrences_.clear();
  if (parts().empty() || parts().front().places == nullptr) return;
  std::vector<uint32_t> by_part;
  by_part.reserve(occurrences_.size());
  for (const ShardPart& part : parts())
    for (int64_t i = 0; i < part.count; ++i) by_part.push_back(occurrences_[static_cast<size_t>(part.places[i])]);
  occurrences_ = std::move(by_part);
}

BatchFacts PreparedWrite::batch_of(const ShardPart& part) const {
  BatchFacts batch = settings_.batch;
  if (!occurrences_.empty()) batch.occurrences = occurrences_.data() + (part.ids - parts().front().ids);
  if (!settings_.pulled_at.empty())
    if (const int64_t writes = settings_.pulled_at[static_cast<size_t>(part.shard)]; writes >= 0)
      batch.pulled_at = writes;
  return batch;
}

void PreparedWrite::keep_rows() {
  if (kept_ || rounded_ || is_merged()) return;
  kept_.reset(new char[std::max<size_t>(1, static_cast<size_t>(num_rows_) * row_bytes())]);
  copy_rows(kept_.get(), rows_, num_rows_, row_bytes());
  rows_ = {kept_.get()};
}

void PreparedWrite::merge(const int64_t*& ids, int64_t& count) {
  if (is_rising(ids, count)) return;
  if (rows_.each != nullptr) throw Fault("InvalidArgument", "ids of rows in several arrays must rise strictly");
  std::vector<int64_t> inverse(static_cast<size_t>(count));
  merged_ids_.resize(static_cast<size_t>(count));
  const int64_t num_distinct = merge_ids(ids, count, merged_ids_.data(), inverse.data());
  if (num_distinct == count) return merged_ids_.clear();
  sums_.resize(static_cast<size_t>(num_distinct * dim_));
  sum_rows(rows_.first, dtype_, inverse.data(), count, dim_, num_distinct, sums_.data());
  merged_ids_.resize(static_cast<size_t>(num_distinct));
  if (counts_occurrences_) {
    std::vector<uint32_t> sums(static_cast<size_t>(num_distinct));
    for (size_t i = 0; i < inverse.size(); ++i)
      add_occurrences(sums[static_cast<size_t>(inverse[i])], occurrences_.empty() ? 1 : occurrences_[i]);
    occurrences_ = std::move(sums);
  }
  ids = merged_ids_.data();
  count = num_distinct;
  rows_ = {reinterpret_cast<const char*>(sums_.data())};
  dtype_ = DType::float32;
}

// Calls visit(rows, count) for contiguous rows.
template <class Visit>
void PreparedWrite::each_block(int64_t count, const Visit& visit) const {
  const int64_t together = rows_.is_one_block() ? count : 1;
  for (int64_t i = 0; i < count; i += together) visit(rows_.at(i, row_bytes()), together);
}

void PreparedWrite::require_finite(const int64_t* ids, int64_t count) const {
  bool is_finite = true;
  each_block(count, [&](const char* rows, int64_t num_rows) {
    is_finite = is_finite && first_non_finite(rows, dtype_, num_rows * dim_) < 0;
  });
  if (is_finite) return;
  int64_t first = -1, num_bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (first_non_finite(rows_.at(i, row_bytes()), dtype_, dim_) < 0) continue;
    if (num_bad++ == 0) first = i;
  }
  throw Fault("NonFinite", std::to_string(num_bad) + " of " + std::to_string(count) +
                               " rows hold NaN or infinity; the first is row " + std::to_string(first) + " (id " +
                               std::to_string(ids[first]) + "); nothing was sent");
}

void PreparedWrite::require_finite_product(int64_t count) const {
  if (!(std::abs(settings_.scale) > 1) || count == 0) return;
  const auto largest = std::bit_cast<float>(largest_bits(count));
  if (!std::isfinite(largest * static_cast<float>(settings_.scale)))
    throw Fault("NonFinite", "scale " + shown(settings_.scale) + " times the largest gradient " +
                                 shown(static_cast<double>(largest)) + " is infinite; lower it. Nothing was sent");
}

// Rounded once, as a retry sends the same bytes.
void PreparedWrite::round(const int64_t* ids, int64_t count, DType wire) {
  if (dtype_ == wire) return;
  const Kernels& k = kernels();
  const DefaultFloatMode float_mode;
  rounded_.reset(new uint16_t[std::max<size_t>(1, static_cast<size_t>(count * dim_))]);
  constexpr size_t kBlock = 1024;
  float wide[kBlock];
  uint32_t largest = 0;
  uint16_t* out = rounded_.get();
  each_block(count, [&](const char* rows, int64_t num_rows) {
    const size_t numbers = static_cast<size_t>(num_rows * dim_);
    for (size_t begin = 0; begin < numbers; begin += kBlock) {
      const size_t size = std::min(kBlock, numbers - begin);
      const char* values = rows + begin * item_bytes(dtype_);
      if (dtype_ != DType::float32) k.load[static_cast<int>(dtype_)](wide, values, size);
      k.store[static_cast<int>(wire)](out, dtype_ == DType::float32 ? reinterpret_cast<const float*>(values) : wide,
                                      size);
      largest = std::max(largest, k.max_abs_bits[static_cast<int>(wire)](out, size));
      out += size;
    }
  });
  if (!(std::bit_cast<float>(largest) <= static_cast<float>(largest_of(wire)))) require_within(ids, count, wire);
  rows_ = {reinterpret_cast<const char*>(rounded_.get())};
  dtype_ = wire;
}

uint32_t PreparedWrite::largest_bits(int64_t count) const {
  uint32_t bits = 0;
  each_block(count, [&](const char* rows, int64_t num_rows) {
    bits = std::max(bits, kernels().max_abs_bits[static_cast<int>(dtype_)](rows, static_cast<size_t>(num_rows * dim_)));
  });
  return bits;
}

// Throws if rounding makes a finite value infinite.
void PreparedWrite::require_within(const int64_t* ids, int64_t count, DType wire) const {
  const Kernels& k = kernels();
  const auto fits = [&](uint32_t bits) {
    const auto value = std::bit_cast<float>(bits);
    uint16_t narrow = 0;
    k.store[static_cast<int>(wire)](&narrow, &value, 1);
    return k.max_abs_bits[static_cast<int>(wire)](&narrow, 1) < kInfinityBits;
  };
  if (fits(largest_bits(count))) return;
  require_finite(ids, count);
  const auto bits_of = [&](int64_t i) {
    return k.max_abs_bits[static_cast<int>(dtype_)](rows_.at(i, row_bytes()), static_cast<size_t>(dim_));
  };
  int64_t first = 0;
  while (fits(bits_of(first))) ++first;
  const bool is_float16 = wire == DType::float16;
  throw Fault("NonFinite",
              "the gradient of id " + std::to_string(ids[first]) + " (row " + std::to_string(first) + ") of table " +
                  quoted(table_) + " holds " + shown(static_cast<double>(std::bit_cast<float>(bits_of(first)))) +
                  ", beyond the range of " + (is_float16 ? "float16 (65504)" : "bfloat16") + "; " +
                  (is_float16 ? "use wire_dtype=\"bfloat16\", which has the range of float32, or scale the loss less"
                              : "scale the loss less") +
                  ". Nothing was sent");
}

Operation PreparedWrite::operation(const ShardPart& part, const CallContext& context) const {
  Operation operation{context, table_, AssignRequest{}};
  const auto fill = [&](auto& request) {
    request.ids = part.ids;
    request.count = part.count;
    request.dim = dim_;
    request.dtype = dtype_;
  };
  if (settings_.is_assign) {
    fill(std::get<AssignRequest>(operation.request));
    return operation;
  }
  PushRequest push;
  fill(push);
  push.lr = settings_.lr;
  push.scale = settings_.scale;
  push.scalars = settings_.scalars;
  push.group = settings_.group;
  push.step_goes_on = settings_.step_goes_on;
  push.batch = batch_of(part);
  operation.request = std::move(push);
  return operation;
}

}  // namespace geartrain
