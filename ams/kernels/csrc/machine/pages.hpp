// Zeroed memory from the kernel: backed only where touched, in huge pages if large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace geartrain {

inline constexpr size_t kHugePage = size_t{2} << 20;

class Pages {
 public:
  Pages() = default;
  // Throws std::bad_alloc if the kernel refuses; touches and counts nothing yet.
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }

  // `bytes` rounded up to whole pages.
  static size_t rounded(size_t bytes);

  explicit operator bool() const { return data_ != nullptr; }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Bit mask, of at most 64 huge pages, of those that contain `size` > 0 bytes from `offset` on.
  static uint64_t huge_pages(size_t offset, size_t size) {
    const size_t last = (offset + size - 1) / kHugePage;
    return (uint64_t{2} << last) - (uint64_t{1} << offset / kHugePage);
  }
  bool counts(uint64_t huge_pages) const { return (counted_ & huge_pages) == huge_pages; }
  // Counts these as memory in use; returns those that were not before. Throws OverBudget, and then nothing has changed.
  uint64_t count(uint64_t huge_pages);
  // Reverts a `count` of pages that were not written since. Returns whether none is left.
  bool discount(uint64_t huge_pages) noexcept;
  // Counts all. Throws OverBudget, and then nothing has changed.
  void count_all();

 private:
  int64_t bytes_in(uint64_t huge_pages) const;
  void swap(Pages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(counted_, other.counted_);
    std::swap(counted_bytes_, other.counted_bytes_);
  }

  char* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t counted_ = 0;
  int64_t counted_bytes_ = 0;
};

}  // namespace geartrain
