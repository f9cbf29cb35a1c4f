// Growing array of equal items in fixed slabs: items never move, and only touched ones use memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "index/index_tree.hpp"
#include "machine/pages.hpp"

namespace geartrain {

class SlabArray;

// Memory that `SlabArray::ensure` counted for a write that may still be refused: returned unless kept.
class NewMemory {
 public:
  NewMemory() = default;
  NewMemory(const NewMemory&) = delete;
  NewMemory& operator=(const NewMemory&) = delete;
  ~NewMemory();
  void keep() noexcept { parts_.clear(); }

 private:
  friend class SlabArray;
  struct Part {
    SlabArray* array;
    int64_t slab;
    uint64_t huge_pages;
  };
  std::vector<Part> parts_;
};

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

  // Makes `at(position)` valid, zeroed if new, and counts its memory. Throws std::bad_alloc, and then nothing has
  // changed.
  void ensure(int64_t position, NewMemory* news = nullptr);

  // Returns the memory after the first `items` items, and that of whole slabs above `most_bytes`.
  void keep(int64_t items, int64_t most_bytes) {
    const int64_t slab_items = int64_t{1} << shift_;
    const int64_t slabs = std::min((items + slab_items - 1) / slab_items, most_bytes / (slab_items * item_bytes_));
    for (int64_t slab = slabs_.next(slabs); slab >= 0; slab = slabs_.next(slab + 1)) slabs_.at(slab) = Pages();
  }

  int64_t item_bytes() const { return item_bytes_; }
  // Number of first items that have slabs without a gap.
  int64_t capacity() const {
    int64_t slabs = 0;
    for (const Pages* slab = slabs_.find(0); slab != nullptr && *slab; slab = slabs_.find(slabs)) ++slabs;
    return slabs << shift_;
  }

 private:
  friend class NewMemory;
  static constexpr int64_t kSlabBytes = int64_t{32} << 20;

  int64_t item_bytes_;
  int shift_;
  IndexTree<Pages> slabs_;
};

inline void SlabArray::ensure(int64_t position, NewMemory* news) {
  const int64_t index = position >> shift_, offset = (position & ((int64_t{1} << shift_) - 1)) * item_bytes_;
  const uint64_t huge_pages = Pages::huge_pages(static_cast<size_t>(offset), static_cast<size_t>(item_bytes_));
  Pages* slab = slabs_.find(index);
  if (slab != nullptr && slab->counts(huge_pages)) return;
  if (slab == nullptr || !*slab) {
    Pages fresh(static_cast<size_t>(item_bytes_) << shift_);
    slab = &slabs_.make_place(index);
    *slab = std::move(fresh);
  }
  if (news != nullptr) news->parts_.push_back({this, index, 0});
  const uint64_t counted = slab->count(huge_pages);
  if (news != nullptr) news->parts_.back().huge_pages = counted;
}

inline NewMemory::~NewMemory() {
  for (const Part& part : parts_) {
    Pages& slab = part.array->slabs_.at(part.slab);
    if (slab && slab.discount(part.huge_pages)) slab = Pages();
  }
}

}  // namespace geartrain
