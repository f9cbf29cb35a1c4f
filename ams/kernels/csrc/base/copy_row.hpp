// Copies of table rows.
#pragma once

#include <cstddef>
#include <cstring>

namespace geartrain {

// Rows of more bytes together than the caches hold are written past them; fewer stay in them for their reader.
inline constexpr size_t kStreamedBytes = size_t{24} << 20;

// Most rows are short: a call of memcpy would take longer than the copy.
inline void copy_row(char* to, const char* from, size_t bytes) {
  constexpr size_t kBlock = 16, kShort = 256;
  if (bytes > kShort) {
    std::memcpy(to, from, bytes);
    return;
  }
  size_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) std::memcpy(to + at, from + at, kBlock);
  for (; at < bytes; ++at) to[at] = from[at];
}

}  // namespace geartrain
