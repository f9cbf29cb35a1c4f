// Items: memory slots of the rows of a dense table.
//
// Items come in chunks; a chunk belongs to one region of the layout, of 16 MiB, or of 32768 rows if those are less.
// While less than half of a region's rows exist, they fill its chunks in order of arrival, with numbers by position:
// sparse rows take the memory of rows, and up to 2 bytes for each id around them. From half on a region has all of its
// chunks, and its rows lie in the order of their positions, without numbers: a full table is read in order, for one
// access to a list of chunks. Rows move once, and only within their region.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <bitset>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "base/common.hpp"
#include "index/dense_layout.hpp"
#include "index/index_tree.hpp"
#include "machine/memory_budget.hpp"

namespace geartrain {

class DenseItems {
 public:
  static constexpr int64_t kMaxRegionRows = 1 << 15;

  // The arguments are those of DenseLayout, and the bytes of a row with all that belongs to it.
  DenseItems(const std::vector<int64_t>& owned, int64_t num_rows, int64_t item_bytes)
      : layout_(owned, num_rows, bits_of(std::clamp<int64_t>(kRegionBytes / item_bytes, kRunRows, kMaxRegionRows))),
        chunk_bits_(
            bits_of(std::clamp<int64_t>(kSpareBytesOfId * layout_.region_rows() / item_bytes, 1, kMaxRegionRows))) {}

  const DenseLayout& layout() const { return layout_; }

  // Item of a position that has one.
  int64_t at(int64_t position) const {
    const Region& region = regions_.at(layout_.region_of(position));
    int64_t place = layout_.place_in_region(position);
    if (region.numbers) place = *region.numbers->find(place) - 1;
    return item_of(region, place);
  }
  // Prefetches the data for finding a position's item, beyond the few KiB of the whole table.
  void prefetch(int64_t position) const {
    const Region* region = regions_.find(layout_.region_of(position));
    if (region == nullptr || !region->numbers) return;
    if (const uint16_t* number = region->numbers->find(layout_.place_in_region(position))) prefetch_bytes(number, 1);
  }
  // Item of a position in a region with all of its rows, else -1: such a region needs no check row by row.
  int64_t at_if_full(int64_t position) const {
    const Region* region = regions_.find(layout_.region_of(position));
    return region != nullptr && region->is_full ? item_of(*region, layout_.place_in_region(position)) : -1;
  }
  bool is_full(int64_t position) const {
    const Region* region = regions_.find(layout_.region_of(position));
    return region != nullptr && region->is_full;
  }
  // Records a new row at a position with an item.
  void created(int64_t position) {
    Region& region = regions_.at(layout_.region_of(position));
    region.is_full = ++region.num_rows == layout_.rows_of_region(layout_.region_of(position));
  }
  // Records a removed row; the item stays at its position.
  void removed(int64_t position) {
    Region& region = regions_.at(layout_.region_of(position));
    --region.num_rows;
    region.is_full = false;
  }

  // Items in chunks: 0 up to this number.
  int64_t num_items() const { return num_chunks_ << chunk_bits_; }
  // Upper bound of the items while the buckets are those at creation.
  int64_t most_items() const { return layout_.max_rows(int64_t{1} << chunk_bits_); }
  int64_t memory_bytes() const { return num_chunks_ * static_cast<int64_t>(sizeof(uint32_t)) + numbers_bytes_; }

  // Memory of a table with all rows of its owned buckets, and no others.
  struct Full {
    int64_t rows = 0, items = 0;
    int64_t index_bytes = 0;  // those of a DenseDirectory
  };
  Full when_full(const std::vector<int64_t>& owned) const;

  class Growth;

 private:
  static constexpr int64_t kRegionBytes = 16 << 20;  // moving half of it takes a few milliseconds, once
  static constexpr int64_t kSpareBytesOfId = 2;  // a region's last chunk may be nearly empty
  static constexpr int64_t kRunRows = 64;

  static int bits_of(int64_t most) { return std::bit_width(static_cast<uint64_t>(most)) - 1; }

  struct Run {
    std::array<uint16_t, kRunRows> numbers{};

    Run() { charge_memory(sizeof(Run)); }
    ~Run() { release_memory(sizeof(Run)); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
  };
  // Numbers by place in the region: from 1 on, in order of arrival; 0: none. Allocated in runs, so that few rows take
  // little memory.
  struct Numbers {
    std::vector<std::unique_ptr<Run>> runs;

    explicit Numbers(int64_t rows) : runs(static_cast<size_t>(rows / kRunRows)) { charge_memory(list_bytes()); }
    ~Numbers() { release_memory(list_bytes()); }
    Numbers(const Numbers&) = delete;
    Numbers& operator=(const Numbers&) = delete;

    std::unique_ptr<Run>& run_of(int64_t place) { return runs[static_cast<size_t>(place / kRunRows)]; }
    // Null: none of the run has a number.
    uint16_t* find(int64_t place) const {
      Run* run = runs[static_cast<size_t>(place / kRunRows)].get();
      return run != nullptr ? &run->numbers[static_cast<size_t>(place % kRunRows)] : nullptr;
    }
    int64_t list_bytes() const { return static_cast<int64_t>(runs.size() * sizeof(runs[0])); }
    int64_t memory_bytes() const {
      const auto is_there = [](const auto& run) { return run != nullptr; };
      return list_bytes() + std::ranges::count_if(runs, is_there) * static_cast<int64_t>(sizeof(Run));
    }
  };
  struct Region {
    std::unique_ptr<Numbers> numbers;  // null: no rows yet, or they are in order
    std::vector<uint32_t> chunks;      // empty once they are known to be neighbours, in order
    int64_t first_item = -1;           // first item of those neighbours
    int32_t num_numbers = 0;
    int32_t num_rows = 0;
    bool is_full = false;
    bool grows = false;  // whether a Growth includes it

    bool is_in_order() const { return first_item >= 0 || (!numbers && !chunks.empty()); }
  };

  int64_t item_of(const Region& region, int64_t place) const {
    if (region.first_item >= 0) return region.first_item + place;
    const int64_t chunk = region.chunks[static_cast<size_t>(place >> chunk_bits_)];
    return chunk << chunk_bits_ | (place & ((int64_t{1} << chunk_bits_) - 1));
  }
  bool is_half_full(int64_t index) const { return 2 * regions_.at(index).num_numbers >= layout_.rows_of_region(index); }
  template <class Copy, class Clear>
  void put_in_order(Region& region, int64_t num_old, const Copy& copy, const Clear& clear);

  DenseLayout layout_;
  int chunk_bits_;
  IndexTree<Region, int64_t{1} << 17> regions_;
  int64_t num_chunks_ = 0;
  int64_t numbers_bytes_ = 0;
};

// Items for rows of a request that may still be refused: released unless kept.
class DenseItems::Growth {
 public:
  explicit Growth(DenseItems& items) : items_(items), chunks_before_(items.num_chunks_) {}
  Growth(const Growth&) = delete;
  Growth& operator=(const Growth&) = delete;
  ~Growth();

  // Assigns an item to each position that has none; repeats allowed. Calls ensure(item) for the first and last item of
  // each new chunk. Throws what that throws, or std::bad_alloc.
  template <class Ensure>
  void take(const std::vector<int64_t>& positions, const Ensure& ensure);
  // Keeps all. Rows of regions that are half full now move: copy(to, from) copies an item, clear(item) zeroes it.
  template <class Copy, class Clear>
  void keep(const Copy& copy, const Clear& clear);

 private:
  struct Grown {
    int64_t region;
    int32_t num_old;  // numbers before
    size_t chunks_before;
  };
  struct Made {
    int64_t position;
    bool run, numbers;  // whether they were allocated for it
  };

  void number(int64_t position);
  void add_chunk(Region& region);

  DenseItems& items_;
  int64_t chunks_before_;
  std::vector<Grown> grown_;
  std::vector<Made> made_;
};

template <class Ensure>
void DenseItems::Growth::take(const std::vector<int64_t>& positions, const Ensure& ensure) {
  made_.reserve(positions.size());
  constexpr size_t kPrefetchDistance = 12;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (i + kPrefetchDistance < positions.size()) items_.prefetch(positions[i + kPrefetchDistance]);
    number(positions[i]);
  }
  for (const Grown& grown : grown_) {
    Region& region = items_.regions_.at(grown.region);
    const int64_t rows =
        items_.is_half_full(grown.region) ? items_.layout_.rows_of_region(grown.region) : region.num_numbers;
    while (static_cast<int64_t>(region.chunks.size()) << items_.chunk_bits_ < rows) {
      add_chunk(region);
      ensure(items_.num_items() - (int64_t{1} << items_.chunk_bits_));
      ensure(items_.num_items() - 1);
    }
  }
}

template <class Copy, class Clear>
void DenseItems::Growth::keep(const Copy& copy, const Clear& clear) {
  for (const Grown& grown : grown_) {
    Region& region = items_.regions_.at(grown.region);
    region.grows = false;
    if (items_.is_half_full(grown.region)) items_.put_in_order(region, grown.num_old, copy, clear);
  }
  grown_.clear();
}

// Rows of the first `num_old` numbers, fewer than half of all, are at those items; others have not been written.
template <class Copy, class Clear>
void DenseItems::put_in_order(Region& region, int64_t num_old, const Copy& copy, const Clear& clear) {
  // Item of the row of a place; -1: none.
  const auto source = [&](int64_t place) {
    const uint16_t* number = region.numbers->find(place);
    return number != nullptr && *number <= num_old ? int64_t{*number} - 1 : -1;
  };
  const auto move = [&](int64_t to, int64_t from) { copy(item_of(region, to), item_of(region, from)); };
  std::bitset<kMaxRegionRows> done;
  int64_t spare = -1;
  // First the chains: a row moves to a free place, and frees its own for the next.
  for (int64_t begin = 0; num_old > 0 && begin < layout_.region_rows(); ++begin) {
    if (source(begin) < 0) {
      if (begin >= num_old && spare < 0) spare = begin;
      continue;
    }
    if (begin < num_old) continue;
    int64_t place = begin;
    for (int64_t from; (from = source(place)) >= 0; place = from) {
      move(place, from);
      done.set(static_cast<size_t>(place));
    }
    clear(item_of(region, place));
  }
  // The rest are cycles of rows in each other's places.
  for (int64_t begin = 0; begin < num_old; ++begin) {
    const int64_t first = source(begin);
    if (first < 0 || first == begin || done.test(static_cast<size_t>(begin))) continue;
    move(spare, begin);
    int64_t place = begin;
    for (int64_t from; (from = source(place)) != begin; place = from) {
      move(place, from);
      done.set(static_cast<size_t>(place));
    }
    move(place, spare);
    done.set(static_cast<size_t>(place));
    clear(item_of(region, spare));
  }
  numbers_bytes_ -= region.numbers->memory_bytes();
  region.numbers.reset();
  const auto is_gap = [](uint32_t before, uint32_t next) { return next != before + 1; };
  if (std::ranges::adjacent_find(region.chunks, is_gap) != region.chunks.end()) return;
  region.first_item = item_of(region, 0);
  std::vector<uint32_t>().swap(region.chunks);
}

}  // namespace geartrain
