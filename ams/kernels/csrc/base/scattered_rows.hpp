// Rows whose numbers lie in several arrays: those of a module's parameters, or of their gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace geartrain {

// The bytes of all ranges, one range after the other, cut into rows; the last row ends with zeros. Rows lie where they are but for
// those that begin in one range and end in another.
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
  // Takes what the ranges hold of rows that lie in several of them. Before the rows are read.
  void gather() const;
  // Gives it back. Once the rows are written.
  void scatter() const;

 private:
  // What a row has of one range.
  struct Piece {
    char* range;
    char* own;
    size_t bytes;
  };

  const size_t row_bytes_;
  std::vector<char*> each_;
  std::vector<Piece> pieces_;
  std::unique_ptr<char[]> own_;  // rows of several ranges, one after the other
};

}  // namespace geartrain
