// Sparse bit set of positions, in pages of 4 KiB that exist only with members: a table of 2**40 rows, few of them
// present, has few pages.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/common.hpp"
#include "index/index_tree.hpp"

namespace geartrain {

class Bits {
  static constexpr int kPageShift = 15;

 public:
  static constexpr int64_t kPageBits = int64_t{1} << kPageShift;
  static constexpr int64_t kPageBytes = kPageBits / 8;

  Bits() = default;
  Bits(Bits&& other) noexcept : pages_(std::move(other.pages_)), num_pages_(std::exchange(other.num_pages_, 0)) {}
  Bits& operator=(Bits&& other) noexcept {
    pages_ = std::move(other.pages_);  // swaps
    std::swap(num_pages_, other.num_pages_);
    return *this;
  }
  // The positions 0 .. count-1.
  static Bits first(int64_t count) {
    Bits bits;
    for (int64_t at = 0; at < count; at += kPageBits) {
      bits.ensure(at);
      auto& words = bits.pages_.at(at >> kPageShift)->words;
      const int64_t here = std::min(count - at, kPageBits);
      for (int64_t word = 0; word < here / 64; ++word) words[static_cast<size_t>(word)] = ~uint64_t{0};
      if (here % 64 != 0) words[static_cast<size_t>(here / 64)] = (uint64_t{1} << (here % 64)) - 1;
    }
    return bits;
  }
  Bits copy() const {
    Bits bits;
    bits.add(*this);
    return bits;
  }

  bool has(int64_t at) const {
    const auto* page = pages_.find(at >> kPageShift);
    return page != nullptr && *page && (word_of(**page, at) >> (at & 63) & 1) != 0;
  }
  void prefetch(int64_t at) const {
    const auto* page = pages_.find(at >> kPageShift);
    if (page != nullptr && *page) prefetch_bytes(&word_of(**page, at), 1);
  }
  // Makes `set(at)` possible. Throws std::bad_alloc, and then nothing has changed.
  void ensure(int64_t at) {
    const auto* page = pages_.find(at >> kPageShift);
    if (page != nullptr && *page) return;
    auto fresh = std::make_unique<Page>();
    pages_.make_place(at >> kPageShift) = std::move(fresh);
    ++num_pages_;
  }
  void set(int64_t at) { word_of(*pages_.at(at >> kPageShift), at) |= uint64_t{1} << (at & 63); }
  // `at` must be a member, or `ensure` was called for it.
  void clear(int64_t at) { word_of(*pages_.at(at >> kPageShift), at) &= ~(uint64_t{1} << (at & 63)); }
  // Lowest member >= `from`, or -1.
  int64_t next(int64_t from) const {
    return next_where(from, [](int64_t) { return true; });
  }
  // Lowest member >= `from` that `wanted` accepts, or -1.
  template <class Wanted>
  int64_t next_where(int64_t from, const Wanted& wanted) const {
    for (int64_t index = pages_.next(from >> kPageShift); index >= 0; index = pages_.next(index + 1)) {
      const int64_t begin = std::max(from, index * kPageBits);
      const auto& words = pages_.at(index)->words;
      uint64_t skipped = ~uint64_t{0} << (begin & 63);
      for (size_t word = static_cast<size_t>((begin & (kPageBits - 1)) >> 6); word < words.size(); ++word) {
        for (uint64_t left = words[word] & skipped; left != 0; left &= left - 1) {
          const int64_t member = index * kPageBits + static_cast<int64_t>(word) * 64 + std::countr_zero(left);
          if (wanted(member)) return member;
        }
        skipped = ~uint64_t{0};
      }
    }
    return -1;
  }
  int64_t count() const {
    int64_t members = 0;
    for (int64_t index = pages_.next(0); index >= 0; index = pages_.next(index + 1))
      for (uint64_t word : pages_.at(index)->words) members += std::popcount(word);
    return members;
  }
  // Adds the members of `other`. Cannot fail if `ensure` was called for all of them; else it throws std::bad_alloc, and
  // some may have been added.
  void add(const Bits& other) {
    for (int64_t index = other.pages_.next(0); index >= 0; index = other.pages_.next(index + 1)) {
      ensure(index * kPageBits);
      auto& words = pages_.at(index)->words;
      const auto& theirs = other.pages_.at(index)->words;
      for (size_t word = 0; word < words.size(); ++word) words[word] |= theirs[word];
    }
  }
  // Removes the members of `other`.
  void subtract(const Bits& other) {
    for (int64_t index = other.pages_.next(0); index >= 0; index = other.pages_.next(index + 1)) {
      const auto* page = pages_.find(index);
      if (page == nullptr || !*page) continue;
      const auto& theirs = other.pages_.at(index)->words;
      for (size_t word = 0; word < theirs.size(); ++word) (*page)->words[word] &= ~theirs[word];
    }
  }
  int64_t memory_bytes() const { return num_pages_ * static_cast<int64_t>(sizeof(Page)); }

 private:
  struct Page {
    std::array<uint64_t, kPageBits / 64> words{};
  };

  static uint64_t& word_of(Page& page, int64_t at) {
    return page.words[static_cast<size_t>((at & (kPageBits - 1)) >> 6)];
  }

  IndexTree<std::unique_ptr<Page>> pages_;
  int64_t num_pages_ = 0;
};

}  // namespace geartrain
