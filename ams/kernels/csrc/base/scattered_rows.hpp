// Rows spread over several arrays: those of a module's parameters, or of their gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace geartrain {

// The bytes of all ranges, one after another, cut into rows; the last row is padded with zeros. Rows stay in place,
// except those that cross from one range into another.
class ScatteredRows {
 public:
  struct Range {
    char* begin;
    size_t bytes;
  };
  // The ranges stay the caller's.
  ScatteredRows(std::span<const Range> ranges, size_t row_bytes);
  ScatteredRows(const ScatteredRows&) = delete;
  ScatteredRows& operator=(const ScatteredRows&) = delete;

  int64_t count() const { return static_cast<int64_t>(each_.size()); }
  size_t row_bytes() const { return row_bytes_; }
  char* const* each() const { return each_.data(); }
  // Copies rows that cross ranges out of them. To be called before the rows are read.
  void gather() const;
  // Copies those rows back. To be called once the rows are written.
  void scatter() const;

 private:
  // Part of a row in one range.
  struct Piece {
    char* range;
    char* own;
    size_t bytes;
  };

  const size_t row_bytes_;
  std::vector<char*> each_;
  std::vector<Piece> pieces_;
  std::unique_ptr<char[]> own_;  // rows that cross ranges, one after another
};

}  // namespace geartrain
