// A growing array of equal items in fixed slabs: items never move, and memory is used where items were touched.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "index_tree.hpp"
#include "pages.hpp"

namespace geartrain {

class SlabArray {
 public:
  // Slabs hold a power of two of items, about 32 MiB, but no more than `most_items` rounded up.
  SlabArray(int64_t item_bytes, int64_t most_items) : item_bytes_(item_bytes) {
    const int64_t wanted = std::clamp<int64_t>(kSlabBytes / item_bytes, 1, std::max<int64_t>(most_items, 1));
    shift_ = std::bit_width(static_cast<uint64_t>(wanted) - 1);
  }

  char* at(int64_t position) const {
    const int64_t offset = position & ((int64_t{1} << shift_) - 1);
    return slabs_.at(position >> shift_).data() + offset * item_bytes_;
  }

  bool has(int64_t position) const {
    const Pages* slab = slabs_.find(position >> shift_);
    return slab != nullptr && *slab;
  }

  // Makes `at(position)` valid, zeroed if new. Throws std::bad_alloc, and then nothing has changed.
  void ensure(int64_t position) {
    if (has(position)) return;
    Pages fresh(static_cast<size_t>(item_bytes_) << shift_);
    slabs_.make_place(position >> shift_) = std::move(fresh);
  }

  // Gives back the memory behind the first `items` items, and that of whole slabs above `most_bytes`.
  void keep(int64_t items, int64_t most_bytes) {
    const int64_t slab_items = int64_t{1} << shift_;
    const int64_t slabs = std::min((items + slab_items - 1) / slab_items, most_bytes / (slab_items * item_bytes_));
    for (int64_t slab = slabs_.next(slabs); slab >= 0; slab = slabs_.next(slab + 1)) slabs_.at(slab) = Pages();
  }

  int64_t item_bytes() const { return item_bytes_; }
  // The first items that there are slabs for without a gap.
  int64_t capacity() const {
    int64_t items = 0;
    while (has(items)) items += int64_t{1} << shift_;
    return items;
  }

 private:
  static constexpr int64_t kSlabBytes = int64_t{32} << 20;

  int64_t item_bytes_;
  int shift_;
  IndexTree<Pages> slabs_;
};

}  // namespace geartrain
