// Sparse array: memory, and the time of a walk, grow with the items and not with their indices.
//
// The first thousands of items are in an array, so that finding an item of an ordinary table costs no more than that;
// the others are in a tree of nodes of 512, as high as the largest index needs.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace geartrain {

// An Item is false until it is assigned, as `bool(item)`. `kMaxFirst`: length of the array.
template <class Item, int64_t kMaxFirst = 8192>
class IndexTree {
 public:
  IndexTree() = default;
  ~IndexTree() { destroy(root_, shift_); }
  IndexTree(IndexTree&& other) noexcept { swap(other); }
  IndexTree& operator=(IndexTree&& other) noexcept {
    swap(other);
    return *this;
  }

  // Place of `index` >= 0, whose item may be false, or null.
  Item* find(int64_t index) const {
    if (index < num_first_) [[likely]]
      return first_ + index;
    return find_beyond(index);
  }

  // Place of an index for which `make_place` was called.
  Item& at(int64_t index) const {
    if (index < num_first_) [[likely]]
      return first_[index];
    return *find_beyond(index);
  }

  // Throws std::bad_alloc, and then no item has changed.
  Item& make_place(int64_t index) {
    if (index < kMaxFirst) {
      if (index >= num_first_) grow_first(index + 1);
      return first_[index];
    }
    if (root_ == nullptr) {
      int shift = 0;
      while (index >= end_of(shift)) shift += kBits;
      root_ = new_node(shift);
      shift_ = shift;
      end_ = end_of(shift);
    }
    while (index >= end_) {
      auto* top = new Branch();
      top->children[0] = root_;
      root_ = top;
      shift_ += kBits;
      end_ = end_of(shift_);
    }
    void* node = root_;
    for (int shift = shift_; shift > 0; shift -= kBits) {
      void*& child = static_cast<Branch*>(node)->children[index >> shift & kMask];
      if (child == nullptr) child = new_node(shift - kBits);
      node = child;
    }
    return static_cast<Twig*>(node)->items[index & kMask];
  }

  // Lowest index >= `from` whose item is true, or -1.
  int64_t next(int64_t from) const {
    for (; from < num_first_; ++from)
      if (first_[from]) return from;
    return from >= end_ ? -1 : next_in(root_, shift_, from);
  }

 private:
  static constexpr int kBits = 9;
  static constexpr int64_t kFanOut = int64_t{1} << kBits;
  static constexpr int64_t kMask = kFanOut - 1;

  struct Branch {
    std::array<void*, kFanOut> children{};
  };
  struct Twig {
    std::array<Item, kFanOut> items{};
  };

  static int64_t end_of(int shift) { return shift + kBits >= 63 ? INT64_MAX : int64_t{1} << (shift + kBits); }
  static void* new_node(int shift) {
    return shift > 0 ? static_cast<void*>(new Branch()) : static_cast<void*>(new Twig());
  }

  static void destroy(void* node, int shift) {
    if (node == nullptr) return;
    if (shift == 0) {
      delete static_cast<Twig*>(node);
      return;
    }
    for (void* child : static_cast<Branch*>(node)->children) destroy(child, shift - kBits);
    delete static_cast<Branch*>(node);
  }

  // `from`, and the result, count from the first index of the node.
  static int64_t next_in(const void* node, int shift, int64_t from) {
    for (int64_t place = from >> shift; place < kFanOut; ++place) {
      if (shift == 0) {
        if (static_cast<const Twig*>(node)->items[place]) return place;
      } else if (const void* child = static_cast<const Branch*>(node)->children[place]) {
        const int64_t begin = place << shift;
        const int64_t found = next_in(child, shift - kBits, from > begin ? from - begin : 0);
        if (found >= 0) return begin + found;
      }
    }
    return -1;
  }

  // Not inlined, so that loops over rows stay small.
  [[gnu::noinline, gnu::cold]] Item* find_beyond(int64_t index) const {
    if (index >= end_) return nullptr;
    void* node = root_;
    for (int shift = shift_; shift > 0; shift -= kBits) {
      node = static_cast<Branch*>(node)->children[index >> shift & kMask];
      if (node == nullptr) return nullptr;
    }
    return &static_cast<Twig*>(node)->items[index & kMask];
  }

  void grow_first(int64_t count) {
    storage_.resize(static_cast<size_t>(count));
    first_ = storage_.data();
    num_first_ = count;
  }

  void swap(IndexTree& other) noexcept {
    storage_.swap(other.storage_);
    std::swap(first_, other.first_);
    std::swap(num_first_, other.num_first_);
    std::swap(root_, other.root_);
    std::swap(shift_, other.shift_);
    std::swap(end_, other.end_);
  }

  std::vector<Item> storage_;  // of the indices below kMaxFirst, up to the largest one that has a place
  Item* first_ = nullptr;
  int64_t num_first_ = 0;
  void* root_ = nullptr;
  int shift_ = 0;    // from an index to the place in the root
  int64_t end_ = 0;  // indices below it fit
};

}  // namespace geartrain
