#include "embedding/lookup.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <stdexcept>
#include <utility>

#include "base/copy_row.hpp"
#include "base/keyed_hash.hpp"
#include "machine/fan_out.hpp"
#include "values/kernels.hpp"

namespace geartrain {
namespace {

constexpr int32_t kPadding = -1;
constexpr int64_t kIdsOfAHand = 1 << 15;  // for fewer ids a second thread costs more than it saves
constexpr int64_t kRowsAhead = 16;

// Reads rows of a table as float32, in place if possible.
class RowReader {
 public:
  explicit RowReader(const Lookup::Rows& rows)
      : rows_(static_cast<const char*>(rows.rows)),
        bytes_(static_cast<size_t>(rows.dim) * item_bytes(rows.dtype)),
        width_(static_cast<size_t>(rows.dim)),
        dtype_(static_cast<int>(rows.dtype)),
        buffer_(rows.dtype == DType::float32 ? 0 : width_) {}

  // Valid until the next call.
  const float* operator()(int32_t place) {
    const char* row = rows_ + static_cast<size_t>(place) * bytes_;
    if (buffer_.empty()) return reinterpret_cast<const float*>(row);
    kernels().load[dtype_](buffer_.data(), row, width_);
    return buffer_.data();
  }
  void prefetch(int32_t place) const {
    if (place != kPadding) prefetch_bytes(rows_ + static_cast<size_t>(place) * bytes_, bytes_);
  }

 private:
  const char* rows_;
  size_t bytes_, width_;
  int dtype_;
  std::vector<float> buffer_;
};

// Factors of a bag: each value's weight, and `all` for the sum.
struct BagFactors {
  const float* weights;  // null: 1
  float all;
};

BagFactors factors_of(const Feature& feature, const int32_t* places, int64_t begin, int64_t end) {
  const float* weights = feature.weights;
  if (feature.pooling == Pooling::sum) return {weights, 1.0f};
  double total = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (places[i] == kPadding) continue;
    const double weight = weights == nullptr ? 1.0 : static_cast<double>(weights[i]);
    total += feature.pooling == Pooling::sqrtn ? weight * weight : weight;
  }
  if (total == 0) return {weights, 0.0f};
  return {weights, static_cast<float>(1.0 / (feature.pooling == Pooling::sqrtn ? std::sqrt(total) : total))};
}

void add_scaled(float* sum, const float* values, int64_t dim, float factor) {
  for (int64_t d = 0; d < dim; ++d) sum[d] += values[d] * factor;
}

void copy_scaled(float* out, const float* values, int64_t dim, float factor) {
  for (int64_t d = 0; d < dim; ++d) out[d] = values[d] * factor;
}

// Like deal_out(), for work that may run out of memory: rethrows the first failed piece's exception.
template <class Work>
void deal_out_throwing(int64_t count, int64_t threads, const Work& work) {
  std::vector<std::exception_ptr> failures(static_cast<size_t>(count));
  deal_out(count, threads, [&](int64_t piece, int64_t) {
    try {
      work(static_cast<size_t>(piece));
    } catch (...) {
      failures[static_cast<size_t>(piece)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& failure : failures)
    if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

Lookup::Lookup(std::vector<Feature> features, std::span<const int64_t> last_ids, int64_t threads)
    : features_(std::move(features)), tables_(last_ids.size()), maxima_(features_.size()), threads_(threads) {
  int64_t count = 0;
  for (size_t i = 0; i < features_.size(); ++i) {
    Feature& feature = features_[i];
    // With one id in each bag, the vector is the row, for any pooling.
    if (feature.offsets == nullptr && feature.width == 1 && feature.weights == nullptr) feature.pooling = Pooling::none;
    first_place_.push_back(count);
    count += features_[i].count;
    tables_.at(static_cast<size_t>(features_[i].table)).features.push_back(static_cast<int64_t>(i));
  }
  places_.reset(new int32_t[static_cast<size_t>(count)]);
  deal_out_throwing(num_tables(), hands(), [&](size_t table) { merge(tables_[table], last_ids[table]); });
}

int64_t Lookup::hands() const {
  const int64_t count = features_.empty() ? 0 : first_place_.back() + features_.back().count;
  return std::clamp<int64_t>(count / kIdsOfAHand, 1, threads_);
}

void Lookup::merge(Table& table, int64_t last_id) {
  int64_t count = 0;
  for (const int64_t feature : table.features) count += features_[static_cast<size_t>(feature)].count;
  table.bits = std::max(4, static_cast<int>(std::bit_width(static_cast<uint64_t>(count))) + 1);
  table.slots.assign(size_t{1} << table.bits, 0);
  std::vector<int64_t>& distinct = table.ids;
  distinct.reserve(static_cast<size_t>(count));
  for (const int64_t number : table.features) {
    const Feature& feature = features_[static_cast<size_t>(number)];
    int32_t* places = places_.get() + first_place_[static_cast<size_t>(number)];
    for (int64_t i = 0; i < feature.count; ++i) {
      const int64_t id = feature.ids[i];
      if (id == feature.padding) {
        places[i] = kPadding;
        continue;
      }
      if (id < 0 || id > last_id) throw BadId{number, i};
      int32_t& slot = table.slot_of(id);
      if (slot == 0) {
        distinct.push_back(id);
        slot = static_cast<int32_t>(distinct.size());
      }
      places[i] = slot - 1;
    }
  }
}

size_t Lookup::Table::at_of(int64_t id) const {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint64_t at = keyed_hash(id) >> (64 - bits);
  while (slots[at] != 0 && ids[static_cast<size_t>(slots[at] - 1)] != id) at = (at + 1) & mask;
  return at;
}

int64_t Lookup::places_among(int64_t number, const int64_t* ids, int64_t count, int32_t* places) const {
  const Table& table = tables_[static_cast<size_t>(number)];
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i)
    if (const int32_t slot = table.slots[table.at_of(ids[i])]; slot != 0) places[found++] = slot - 1;
  return found;
}

void Lookup::count_occurrences(int64_t table, const std::vector<bool>& wanted, uint32_t* counts) const {
  const Table& own = tables_[static_cast<size_t>(table)];
  std::fill_n(counts, own.ids.size(), 0);
  for (const int64_t feature : own.features) {
    if (!wanted[static_cast<size_t>(feature)]) continue;
    const int32_t* places = places_of(feature);
    for (int64_t i = 0; i < features_[static_cast<size_t>(feature)].count; ++i)
      if (places[i] != kPadding) ++counts[places[i]];
  }
}

void Lookup::pool(std::span<const Rows> tables, std::span<float* const> vectors, bool keep_places) {
  deal_out_throwing(static_cast<int64_t>(features_.size()), hands(), [&](size_t feature) {
    pool_feature(feature, tables[static_cast<size_t>(features_[feature].table)], vectors[feature], keep_places);
  });
}

void Lookup::pool_feature(size_t number, const Rows& rows, float* vectors, bool keep_places) {
  const DefaultFloatMode float_mode;
  const Feature& feature = features_[number];
  const int32_t* places = places_of(static_cast<int64_t>(number));
  const int64_t dim = rows.dim;
  RowReader row(rows);
  if (feature.pooling == Pooling::none) {
    for (int64_t i = 0; i < feature.count; ++i) {
      if (i + kRowsAhead < feature.count) row.prefetch(places[i + kRowsAhead]);
      float* out = vectors + i * dim;
      if (places[i] == kPadding) std::fill_n(out, dim, 0.0f);
      else if (feature.weights == nullptr)
        copy_row(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(row(places[i])),
                 static_cast<size_t>(dim) * sizeof(float));
      else copy_scaled(out, row(places[i]), dim, feature.weights[i]);
    }
    return;
  }
  int32_t* maxima = nullptr;
  if (feature.pooling == Pooling::max && keep_places) {
    maxima_[number].reset(new int32_t[static_cast<size_t>(feature.bags * dim)]);
    maxima = maxima_[number].get();
    std::fill_n(maxima, feature.bags * dim, kPadding);
  }
  for (int64_t bag = 0; bag < feature.bags; ++bag) {
    const int64_t begin = feature.begin_of(bag), end = feature.begin_of(bag + 1);
    float* out = vectors + bag * dim;
    bool is_first = true;
    const BagFactors factors =
        feature.pooling == Pooling::max ? BagFactors{feature.weights, 1.0f} : factors_of(feature, places, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < feature.count) row.prefetch(places[i + kRowsAhead]);
      if (places[i] == kPadding) continue;
      const float* values = row(places[i]);
      const float weight = factors.weights == nullptr ? 1.0f : factors.weights[i];
      if (feature.pooling == Pooling::max) {
        for (int64_t d = 0; d < dim; ++d) {
          if (!is_first && !(values[d] > out[d])) continue;
          out[d] = values[d];
          if (maxima != nullptr) maxima[bag * dim + d] = places[i];
        }
      } else if (is_first) {
        copy_scaled(out, values, dim, weight);
      } else {
        add_scaled(out, values, dim, weight);
      }
      is_first = false;
    }
    if (is_first) std::fill_n(out, dim, 0.0f);
    else if (factors.all != 1.0f) copy_scaled(out, out, dim, factors.all);
  }
}

double Lookup::sum_gradients(std::span<const Gradients> vectors, std::span<const int64_t> dims,
                             std::span<float* const> rows) const {
  std::vector<double> squares(tables_.size(), 0.0);
  deal_out_throwing(num_tables(), hands(), [&](size_t at) {
    const DefaultFloatMode float_mode;
    const Table& table = tables_[at];
    const int64_t dim = dims[at];
    int64_t seen = 0;  // places are assigned in order of first appearance, so a new one is exactly the next
    for (const int64_t feature : table.features)
      add_gradients(static_cast<size_t>(feature), vectors[static_cast<size_t>(feature)], dim, rows[at], seen);
    const float* values = rows[at];
    const int64_t count = static_cast<int64_t>(table.ids.size()) * dim;
    constexpr int64_t kLanes = 8;
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const auto value = static_cast<double>(values[i + lane]);
        lanes[lane] += value * value;
      }
    for (; i < count; ++i) lanes[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    for (const double lane : lanes) squares[at] += lane;
  });
  double total = 0;
  for (const double square : squares) total += square;
  return total;
}

void Lookup::add_gradients(size_t number, const Gradients& vectors, int64_t dim, float* rows, int64_t& seen) const {
  const Feature& feature = features_[number];
  const int32_t* places = places_of(static_cast<int64_t>(number));
  const auto add = [&](int64_t i, const float* gradient, float factor) {
    float* row = rows + static_cast<int64_t>(places[i]) * dim;
    if (places[i] != seen) return add_scaled(row, gradient, dim, factor);
    copy_scaled(row, gradient, dim, factor);
    ++seen;
  };
  if (vectors.values == nullptr || feature.pooling == Pooling::max) {  // not every id has a gradient
    for (int64_t i = 0; i < feature.count; ++i) {
      if (places[i] != seen) continue;
      std::fill_n(rows + static_cast<int64_t>(places[i]) * dim, dim, 0.0f);
      ++seen;
    }
    if (vectors.values == nullptr) return;
    const int32_t* maxima = maxima_[number].get();
    if (maxima == nullptr) throw std::logic_error("pool() kept no places");
    for (int64_t bag = 0; bag < feature.bags; ++bag)
      for (int64_t d = 0; d < dim; ++d)
        if (const int32_t place = maxima[bag * dim + d]; place != kPadding)
          rows[static_cast<int64_t>(place) * dim + d] += vectors.values[bag * vectors.stride + d];
    return;
  }
  if (feature.pooling == Pooling::none) {
    for (int64_t i = 0; i < feature.count; ++i)
      if (places[i] != kPadding)
        add(i, vectors.values + i * vectors.stride, feature.weights == nullptr ? 1.0f : feature.weights[i]);
    return;
  }
  for (int64_t bag = 0; bag < feature.bags; ++bag) {
    const int64_t begin = feature.begin_of(bag), end = feature.begin_of(bag + 1);
    const BagFactors factors = factors_of(feature, places, begin, end);
    for (int64_t i = begin; i < end; ++i)
      if (places[i] != kPadding)
        add(i, vectors.values + bag * vectors.stride,
            factors.all * (factors.weights == nullptr ? 1.0f : factors.weights[i]));
  }
}

}  // namespace geartrain
