#include "base/scattered_rows.hpp"

#include <algorithm>
#include <cstring>

namespace geartrain {

ScatteredRows::ScatteredRows(std::span<const Range> ranges, size_t row_bytes) : row_bytes_(row_bytes) {
  size_t all_bytes = 0;
  for (const Range& range : ranges) all_bytes += range.bytes;
  each_.reserve((all_bytes + row_bytes - 1) / row_bytes);
  std::vector<size_t> own_rows;  // their numbers
  size_t begun = 0;              // bytes so far of the last row
  for (const auto& [begin, bytes] : ranges) {
    for (size_t at = 0; at < bytes;) {
      if (begun == 0 && bytes - at >= row_bytes) {
        each_.push_back(begin + at);
        at += row_bytes;
        continue;
      }
      if (begun == 0) {
        own_rows.push_back(each_.size());
        each_.push_back(nullptr);
      }
      const size_t size = std::min(bytes - at, row_bytes - begun);
      pieces_.push_back({begin + at, nullptr, size});
      begun = (begun + size) % row_bytes;
      at += size;
    }
  }
  own_.reset(new char[own_rows.size() * row_bytes]);
  char* next = own_.get();
  for (Piece& piece : pieces_) {
    piece.own = next;
    next += piece.bytes;
  }
  std::memset(next, 0, static_cast<size_t>(own_.get() + own_rows.size() * row_bytes - next));
  for (size_t i = 0; i < own_rows.size(); ++i) each_[own_rows[i]] = own_.get() + i * row_bytes;
}

void ScatteredRows::gather() const {
  for (const Piece& piece : pieces_) std::memcpy(piece.own, piece.range, piece.bytes);
}

void ScatteredRows::scatter() const {
  for (const Piece& piece : pieces_) std::memcpy(piece.range, piece.own, piece.bytes);
}

}  // namespace geartrain
