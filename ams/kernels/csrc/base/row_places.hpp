// Locations of a request's rows in the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

inline const char* row_of(const char* rows, int64_t index, size_t row_bytes) {
  return rows + static_cast<size_t>(index) * row_bytes;
}

// Byte: char of rows that are written, const char of rows that are read.
template <class Byte>
struct RowPlaces {
  Byte* first = nullptr;               // of [M, D], contiguous,
  Byte* const* each = nullptr;         // [M] or null: address of each row, if they are not contiguous
  const int64_t* positions = nullptr;  // [N] or null: the row of ids[i] is number positions[i]; null: number i

  int64_t number(int64_t i) const { return positions != nullptr ? positions[i] : i; }
  Byte* at(int64_t i, size_t row_bytes) const {
    return each != nullptr ? each[number(i)] : first + static_cast<size_t>(number(i)) * row_bytes;
  }
  bool is_one_block() const { return each == nullptr && positions == nullptr; }
};

}  // namespace geartrain
