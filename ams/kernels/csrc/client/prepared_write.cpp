#include "client/prepared_write.hpp"

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
  route(ids, count, placement.bucket_shards.data(), is_dense, placement.num_shards, places_.get(), counts.data(), ids_.get());
  int64_t begin = 0;
  for (int64_t shard = 0; shard < placement.num_shards; ++shard) {
    const int64_t part = counts[static_cast<size_t>(shard)];
    if (part > 0 || every_shard) parts_.push_back({shard, ids_.get() + begin, places_.get() + begin, part});
    begin += part;
  }
}

void copy_rows(char* to, const char* rows, const int64_t* places, int64_t count, size_t row_bytes) {
  if (places == nullptr) {
    if (count != 0) std::memcpy(to, rows, static_cast<size_t>(count) * row_bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i, to += row_bytes) {
    if (i + kRowsAhead < count) prefetch_bytes(rows + static_cast<size_t>(places[i + kRowsAhead]) * row_bytes, row_bytes);
    copy_row(to, rows + static_cast<size_t>(places[i]) * row_bytes, row_bytes);
  }
}

PreparedWrite::PreparedWrite(const TableFacts& table, const Placement& placement, const int64_t* ids, const char* rows, int64_t count,
                             DType dtype, WriteSettings settings, RowCheck check)
    : table_(table.name), dim_(table.dim), dtype_(dtype), rows_(rows), settings_(std::move(settings)) {
  if (check == RowCheck::finite) require_finite(ids, count);
  if (!settings_.is_assign) merge(ids, count);
  if (check == RowCheck::finite && is_merged()) require_finite(ids, count);  // a sum may be infinite where its terms are not
  if (check != RowCheck::none && !settings_.is_assign) require_finite_product(count);
  cut_.emplace(ids, count, placement, table.is_dense, settings_.every_shard);
}

void PreparedWrite::merge(const int64_t*& ids, int64_t& count) {
  if (is_rising(ids, count)) return;
  std::vector<int64_t> inverse(static_cast<size_t>(count));
  merged_ids_.resize(static_cast<size_t>(count));
  const int64_t num_distinct = merge_ids(ids, count, merged_ids_.data(), inverse.data());
  if (num_distinct == count) return merged_ids_.clear();
  sums_.resize(static_cast<size_t>(num_distinct * dim_));
  sum_rows(rows_, dtype_, inverse.data(), count, dim_, num_distinct, sums_.data());
  merged_ids_.resize(static_cast<size_t>(num_distinct));
  ids = merged_ids_.data();
  count = num_distinct;
  rows_ = reinterpret_cast<const char*>(sums_.data());
  dtype_ = DType::float32;
}

void PreparedWrite::require_finite(const int64_t* ids, int64_t count) const {
  const int64_t at = first_non_finite(rows_, dtype_, count * dim_);
  if (at < 0) return;
  const int64_t first = at / dim_;
  int64_t num_bad = 0;
  for (int64_t i = first; i < count; ++i) num_bad += first_non_finite(rows_ + static_cast<size_t>(i) * row_bytes(), dtype_, dim_) >= 0;
  throw Fault("NonFinite", std::to_string(num_bad) + " of " + std::to_string(count) + " rows hold NaN or infinity, first row " +
                               std::to_string(first) + " (id " + std::to_string(ids[first]) + "); nothing was sent");
}

void PreparedWrite::require_finite_product(int64_t count) const {
  if (!(std::abs(settings_.scale) > 1) || count == 0) return;
  const auto bits = kernels().max_abs_bits[static_cast<int>(dtype_)](rows_, static_cast<size_t>(count * dim_));
  const auto largest = std::bit_cast<float>(static_cast<uint32_t>(bits));
  if (!std::isfinite(largest * static_cast<float>(settings_.scale)))
    throw Fault("NonFinite", "scale " + shown(settings_.scale) + " times the largest gradient " + shown(static_cast<double>(largest)) +
                                 " is infinite; nothing was sent");
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
  operation.request = std::move(push);
  return operation;
}

}  // namespace geartrain
