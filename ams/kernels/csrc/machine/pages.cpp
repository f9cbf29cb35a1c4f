#include "machine/pages.hpp"

#include <sys/mman.h>

#include <bit>
#include <cstdint>
#include <new>

#include "machine/memory_budget.hpp"

namespace geartrain {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

size_t Pages::rounded(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return (bytes + unit - 1) / unit * unit;
}

Pages::Pages(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  if (bytes == 0 || bytes > SIZE_MAX / 2) throw std::bad_alloc();
  bytes = rounded(bytes);
  const size_t slack = unit == kHugePage ? kHugePage : 0;
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(raw);
  if (slack != 0) {
    // A huge page needs a 2 MiB boundary: cut the ends off. Both calls are advice or trimming; failure only wastes
    // space.
    char* aligned = begin + (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (aligned != begin) munmap(begin, static_cast<size_t>(aligned - begin));
    const size_t tail = slack - static_cast<size_t>(aligned - begin);
    if (tail != 0) munmap(aligned + bytes, tail);
    begin = aligned;
#if defined(MADV_HUGEPAGE)
    madvise(begin, bytes, MADV_HUGEPAGE);
#endif
  }
  data_ = begin;
  bytes_ = bytes;
}

Pages::~Pages() {
  if (data_ == nullptr) return;
  munmap(data_, bytes_);
  release_memory(counted_bytes_);
}

int64_t Pages::bytes_in(uint64_t huge_pages) const {
  if (bytes_ < kHugePage) return huge_pages != 0 ? static_cast<int64_t>(bytes_) : 0;
  return static_cast<int64_t>(kHugePage) * std::popcount(huge_pages);
}

uint64_t Pages::count(uint64_t huge_pages) {
  const uint64_t added = huge_pages & ~counted_;
  const int64_t bytes = bytes_in(added);
  charge_memory(bytes);
  counted_ |= added;
  counted_bytes_ += bytes;
  return added;
}

bool Pages::discount(uint64_t huge_pages) noexcept {
  const int64_t bytes = bytes_in(huge_pages & counted_);
  release_memory(bytes);
  counted_ &= ~huge_pages;
  counted_bytes_ -= bytes;
  return counted_ == 0;
}

void Pages::count_all() {
  charge_memory(static_cast<int64_t>(bytes_) - counted_bytes_);
  counted_ = ~uint64_t{0};
  counted_bytes_ = static_cast<int64_t>(bytes_);
}

}  // namespace geartrain
