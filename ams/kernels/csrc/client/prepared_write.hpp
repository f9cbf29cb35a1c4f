// A push or assign as a client sends it: checked, equal ids merged, and split by shard once for all attempts.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/copy_row.hpp"
#include "base/row_places.hpp"
#include "frames/frame.hpp"

namespace geartrain {

// A client's facts of a table.
struct TableFacts {
  std::string name;
  int64_t dim = 0;
  DType dtype = DType::float32;
  bool is_dense = true;  // its buckets are those of dense ids
  // Type of pulled rows and pushed gradients in frames; narrower than the table's only for float32.
  DType wire = DType::float32;
  bool counts_occurrences = false;  // whether pushes carry the occurrences of each id in their batch
};

// Shard of each bucket: [kNumBuckets], each below num_shards.
struct Placement {
  std::vector<uint16_t> bucket_shards;
  int64_t num_shards = 1;
};

// Ids of a call that go to one shard.
struct ShardPart {
  int64_t shard = 0;
  const int64_t* ids = nullptr;     // [count]
  const int64_t* places = nullptr;  // [count] places of these ids in the call; null: 0 ... count - 1
  int64_t count = 0;
};

// Ids by shard.
class CutIds {
 public:
  // `ids` stay the caller's, unchanged. With `every_shard` there is a part for each shard, possibly empty.
  CutIds(const int64_t* ids, int64_t count, const Placement& placement, bool is_dense, bool every_shard);
  CutIds(CutIds&&) = default;
  CutIds& operator=(CutIds&&) = default;
  std::span<const ShardPart> parts() const { return parts_; }

 private:
  std::unique_ptr<int64_t[]> ids_, places_;
  std::vector<ShardPart> parts_;
};

// Rows prefetched ahead of the one that is copied: they are anywhere in memory.
inline constexpr int64_t kRowsAhead = 16;

// Row size from which the CPU prefetches well by itself, and a check for each row is free.
inline constexpr size_t kLongRowBytes = 1024;

// Copies rows to `to`, one after the other; past the caches if they are larger than those.
void copy_rows(char* to, const RowPlaces<const char>& from, int64_t count, size_t row_bytes);
// Copies in the other direction.
void copy_rows(const RowPlaces<char>& to, const char* from, int64_t count, size_t row_bytes);
// Widens rows [count, dim] of 16 bits to float32.
void widen_rows(const RowPlaces<char>& to, const char* from, int64_t count, size_t dim, DType dtype);

struct WriteSettings {
  bool is_assign = false;
  std::optional<double> lr;
  double scale = 1.0;
  Scalars scalars;
  std::optional<SyncGroup> group;
  bool step_goes_on = false;
  bool every_shard = false;
  bool are_distinct = false;  // the caller guarantees that no id occurs twice
  BatchFacts batch;           // its occurrences are read when the write is made, not later; without pulled_at
  std::vector<int64_t> pulled_at;  // for each shard; -1: its rows were not pulled. Empty: unknown
};

// Check of the rows of a write before sending.
enum class RowCheck { none, product, finite };  // product: of the largest with `scale`; finite: that, and each of them

class PreparedWrite {
 public:
  // `ids` [count] and `rows` [count, dim] stay the caller's, unchanged, while this lives. Those of an assign are
  // distinct, and scattered rows have ascending ids. Gradients are rounded once to a narrower wire. Throws the Faults
  // NonFinite (also beyond the range of the wire) and InvalidArgument.
  PreparedWrite(const TableFacts& table, const Placement& placement, const int64_t* ids,
                const RowPlaces<const char>& rows, int64_t count, DType dtype, WriteSettings settings, RowCheck check);
  PreparedWrite(const PreparedWrite&) = delete;
  PreparedWrite& operator=(const PreparedWrite&) = delete;

  // Keeps the owner of `ids` and `rows` alive.
  void hold(std::shared_ptr<void> arrays) { held_ = std::move(arrays); }
  // Copies the rows, so that the caller may change its own. Not during a send.
  void keep_rows();

  std::span<const ShardPart> parts() const { return cut_->parts(); }
  // Returns the operation of a part, without its rows.
  Operation operation(const ShardPart& part, const CallContext& context) const;
  // Copies the rows of a part, one after the other, to `to`.
  void copy_rows_of(const ShardPart& part, char* to) const { copy_rows(to, places_of(part), part.count, row_bytes()); }
  RowPlaces<const char> places_of(const ShardPart& part) const { return {rows_.first, rows_.each, part.places}; }
  // Returns them if they are contiguous already; else null.
  const char* rows_of(const ShardPart& part) const { return places_of(part).is_one_block() ? rows_.first : nullptr; }
  BatchFacts batch_of(const ShardPart& part) const;
  const std::optional<SyncGroup>& group() const { return settings_.group; }
  bool is_merged() const { return !sums_.empty(); }
  int64_t num_rows() const { return num_rows_; }
  int64_t dim() const { return dim_; }
  DType dtype() const { return dtype_; }
  size_t row_bytes() const { return static_cast<size_t>(dim_) * item_bytes(dtype_); }

 private:
  void merge(const int64_t*& ids, int64_t& count);
  void cut_occurrences();
  void require_finite(const int64_t* ids, int64_t count) const;
  void require_finite_product(int64_t count) const;
  template <class Visit>
  void each_block(int64_t count, const Visit& visit) const;
  uint32_t largest_bits(int64_t count) const;
  void round(const int64_t* ids, int64_t count, DType wire);
  void require_within(const int64_t* ids, int64_t count, DType wire) const;

  std::shared_ptr<void> held_;
  const std::string table_;
  const int64_t dim_;
  DType dtype_;
  RowPlaces<const char> rows_;
  WriteSettings settings_;
  int64_t num_rows_ = 0;  // merged rows
  std::unique_ptr<char[]> kept_;
  std::vector<int64_t> merged_ids_;
  std::vector<float> sums_;
  std::unique_ptr<uint16_t[]> rounded_;
  std::optional<CutIds> cut_;
  bool counts_occurrences_;
  std::vector<uint32_t> occurrences_;  // part by part; empty: 1 each, or not wanted
};

}  // namespace geartrain
