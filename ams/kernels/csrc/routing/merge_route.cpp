#include "routing/merge_route.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "base/keyed_hash.hpp"
#include "values/kernels.hpp"

namespace geartrain {

bool is_rising(const int64_t* ids, int64_t count) {
  return std::adjacent_find(ids, ids + count, std::greater_equal<>()) == ids + count;
}

int64_t first_out_of_range(const int64_t* ids, int64_t count, int64_t last) {
  // As unsigned numbers, ids below 0 are the largest. A loop without an early exit takes a few instructions for eight
  // ids.
  uint64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint64_t>(ids[i]));
  if (count == 0 || largest <= static_cast<uint64_t>(last)) return -1;
  return std::find_if(ids, ids + count, [last](int64_t id) { return id < 0 || id > last; }) - ids;
}

int64_t merge_ids(const int64_t* ids, int64_t count, int64_t* distinct, int64_t* inverse, Pauses* pauses) {
  constexpr int64_t kBlock = 8192;
  if (is_rising(ids, count)) {  // rising: nothing to look up
    std::copy_n(ids, count, distinct);
    std::iota(inverse, inverse + count, int64_t{0});
    return count;
  }
  const int bits = std::max(4, static_cast<int>(std::bit_width(static_cast<uint64_t>(count))) + 1);
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  std::vector<int64_t> table(size_t{1} << bits, 0);  // place among the distinct ids, plus 1; 0 is empty
  int64_t num_distinct = 0;
  const auto merge = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint64_t at = keyed_hash(ids[i]) >> (64 - bits);
      while (table[at] != 0 && distinct[table[at] - 1] != ids[i]) at = (at + 1) & mask;
      if (table[at] == 0) {
        distinct[num_distinct] = ids[i];
        table[at] = ++num_distinct;
      }
      inverse[i] = table[at] - 1;
    }
  };
  const int64_t block = pauses != nullptr ? kBlock : count;
  for (int64_t begin = 0; begin < count; begin += block) {
    if (pauses != nullptr && pauses->are_wanted()) pauses->pause();
    merge(begin, std::min(count, begin + block));
  }
  return num_distinct;
}

void sum_rows(const void* rows, DType dtype, const int64_t* inverse, int64_t count, int64_t dim, int64_t num_distinct,
              float* sums) {
  DefaultFloatMode float_mode;
  const size_t width = static_cast<size_t>(dim);
  const size_t bytes = width * item_bytes(dtype);
  const Kernels& k = kernels();
  std::vector<float> buffer(dtype == DType::float32 ? 0 : width);
  int64_t seen = 0;  // places are assigned in order of first appearance, so a new one is exactly the next
  for (int64_t i = 0; i < count; ++i) {
    const char* row = static_cast<const char*>(rows) + static_cast<size_t>(i) * bytes;
    float* sum = sums + static_cast<size_t>(inverse[i]) * width;
    if (inverse[i] == seen && seen < num_distinct) {
      k.load[static_cast<int>(dtype)](sum, row, width);
      ++seen;
    } else if (dtype == DType::float32) {
      k.add(sum, reinterpret_cast<const float*>(row), width);
    } else {
      k.load[static_cast<int>(dtype)](buffer.data(), row, width);
      k.add(sum, buffer.data(), width);
    }
  }
}

void route(const int64_t* ids, int64_t count, const uint16_t* bucket_to_shard, bool dense, int64_t num_shards,
           int64_t* order, int64_t* counts, int64_t* ordered_ids) {
  std::fill_n(counts, num_shards, 0);
  const std::unique_ptr<uint16_t[]> shards(new uint16_t[static_cast<size_t>(count)]);
  for (int64_t i = 0; i < count; ++i) {
    shards[static_cast<size_t>(i)] = bucket_to_shard[dense ? dense_bucket(ids[i]) : hashed_bucket(ids[i])];
    ++counts[shards[static_cast<size_t>(i)]];
  }
  std::vector<int64_t> next(static_cast<size_t>(num_shards), 0);
  for (int64_t shard = 1; shard < num_shards; ++shard)
    next[static_cast<size_t>(shard)] = next[static_cast<size_t>(shard - 1)] + counts[shard - 1];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = next[shards[static_cast<size_t>(i)]]++;
    order[at] = i;
    if (ordered_ids != nullptr) ordered_ids[at] = ids[i];
  }
}

int64_t first_non_finite(const void* values, DType dtype, int64_t count) {
  constexpr int64_t kBlock = 4096;
  const auto max_abs_bits = kernels().max_abs_bits[static_cast<int>(dtype)];
  const auto at = [&](int64_t i) {
    return static_cast<const char*>(values) + static_cast<size_t>(i) * item_bytes(dtype);
  };
  for (int64_t i = 0; i < count; i += kBlock) {
    if (max_abs_bits(at(i), static_cast<size_t>(std::min(kBlock, count - i))) < kInfinityBits) continue;
    while (max_abs_bits(at(i), 1) < kInfinityBits) ++i;
    return i;
  }
  return -1;
}

}  // namespace geartrain
