#include "pages.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace geartrain {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Pages::Pages(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  if (bytes == 0 || bytes > SIZE_MAX / 2) throw std::bad_alloc();
  bytes = (bytes + unit - 1) / unit * unit;
  const size_t slack = unit == kHugePage ? kHugePage : 0;
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(raw);
  if (slack != 0) {
    // A huge page needs a 2 MiB boundary: cut the ends off. Both calls are advice or trimming; failure only wastes space.
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
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace geartrain
