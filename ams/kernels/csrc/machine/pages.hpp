// Zeroed memory straight from the kernel: backed only where touched, in huge pages where it is large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace geartrain {

inline constexpr size_t kHugePage = size_t{2} << 20;

class Pages {
 public:
  Pages() = default;
  // Throws std::bad_alloc if the kernel refuses; nothing is touched, and nothing counts yet.
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }

  // What `bytes` are in whole pages.
  static size_t rounded(size_t bytes);

  explicit operator bool() const { return data_ != nullptr; }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Of at most 64 huge pages: those that `size` > 0 bytes from `offset` on lie in, a bit each.
  static uint64_t huge_pages(size_t offset, size_t size) {
    const size_t last = (offset + size - 1) / kHugePage;
    return (uint64_t{2} << last) - (uint64_t{1} << offset / kHugePage);
  }
  bool counts(uint64_t huge_pages) const { return (counted_ & huge_pages) == huge_pages; }
  // Counts these as memory in use from now on; returns those that were not. Throws OverBudget, and then nothing has changed.
  uint64_t count(uint64_t huge_pages);
  // Takes back a `count` of pages that were not written since. Returns whether none is left.
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
