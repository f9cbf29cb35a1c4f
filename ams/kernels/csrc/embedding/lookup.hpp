// Lookup of a batch in embedding tables: ids of all features merged by table, rows pooled, gradients summed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/common.hpp"

namespace geartrain {

// `none`: a vector for each id. The others: one for each bag of ids, zero for an empty one. With weights w of the ids a
// sum is Σ w·x, a mean Σ w·x / Σ w, sqrtn Σ w·x / √Σ w².
enum class Pooling : int { none = 0, sum = 1, mean = 2, sqrtn = 3, max = 4 };
inline constexpr int kNumPoolings = 5;

// Ids of one feature. They stay the caller's, unchanged, while its Lookup lives.
struct Feature {
  int64_t table = 0;  // among those of the lookup
  const int64_t* ids = nullptr;
  int64_t count = 0;
  const int64_t* offsets = nullptr;  // [bags + 1], rising from 0 to count; null: `width` ids in each bag
  int64_t bags = 0;
  int64_t width = 1;
  const float* weights = nullptr;  // [count]; null: all 1
  Pooling pooling = Pooling::sum;
  std::optional<int64_t> padding;  // this id is skipped

  int64_t begin_of(int64_t bag) const { return offsets == nullptr ? bag * width : offsets[bag]; }
  int64_t num_vectors() const { return pooling == Pooling::none ? count : bags; }
};

// First id that is below 0, or above the last one of its table.
struct BadId {
  int64_t feature = 0, place = 0;
};

// Costs one hash table access an id; memory 12 to 20 bytes an id, 8 a distinct one, 4·D a vector of pooling max.
class Lookup {
 public:
  // `last_ids`: largest id of each table. Throws BadId.
  Lookup(std::vector<Feature> features, std::span<const int64_t> last_ids, int64_t threads);
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

  const std::vector<Feature>& features() const { return features_; }
  int64_t num_tables() const { return static_cast<int64_t>(tables_.size()); }
  // The distinct ids of a table, in order of first appearance among its features.
  std::span<const int64_t> ids_of(int64_t table) const { return tables_[static_cast<size_t>(table)].ids; }
  // Writes the places, among the distinct ids of a table, of those of `count` ids that occur. Returns their number.
  int64_t places_among(int64_t table, const int64_t* ids, int64_t count, int32_t* places) const;
  // Place of each id of a feature among the distinct ones of its table; -1: padding.
  const int32_t* places_of(int64_t feature) const { return places_.get() + first_place_[static_cast<size_t>(feature)]; }

  // Writes the occurrences of each distinct id of a table in those of its features that are `wanted`.
  void count_occurrences(int64_t table, const std::vector<bool>& wanted, uint32_t* counts) const;

  struct Rows {
    const void* rows = nullptr;  // [distinct ids, dim]
    DType dtype = DType::float32;
    int64_t dim = 0;
  };
  // Writes the vectors of each feature, [num_vectors, dim], from the rows of the tables. `keep_places`: keeps the
  // places of maxima for sum_gradients().
  void pool(std::span<const Rows> tables, std::span<float* const> vectors, bool keep_places);

  // Gradients of a feature's vectors, `stride` numbers apart.
  struct Gradients {
    const float* values = nullptr;  // null: all zero
    int64_t stride = 0;
  };
  // Writes the gradients of all rows, [distinct ids, dim] a table, from those of the vectors. Returns Σ g² of all:
  // finite only if all of them are. The order of sums, and so every bit, is the same for any number of threads.
  double sum_gradients(std::span<const Gradients> vectors, std::span<const int64_t> dims,
                       std::span<float* const> rows) const;

 private:
  struct Table {
    std::vector<int64_t> features, ids;
    std::vector<int32_t> slots;  // 2^bits by hash: place among the distinct ids, plus 1; 0 is empty
    int bits = 0;

    // Slot of an id, present or not.
    int32_t& slot_of(int64_t id) { return slots[at_of(id)]; }
    size_t at_of(int64_t id) const;
  };

  void merge(Table& table, int64_t last_id);
  void pool_feature(size_t feature, const Rows& rows, float* vectors, bool keep_places);
  void add_gradients(size_t feature, const Gradients& vectors, int64_t dim, float* rows, int64_t& seen) const;
  int64_t hands() const;

  std::vector<Feature> features_;
  std::vector<Table> tables_;
  std::vector<int64_t> first_place_;
  std::unique_ptr<int32_t[]> places_;
  // for features of pooling max, [bags, dim]: place of the maximum; -1: none
  std::vector<std::unique_ptr<int32_t[]>> maxima_;
  const int64_t threads_;
};

}  // namespace geartrain
