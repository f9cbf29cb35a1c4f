// Copies rows into a caller's array.
#pragma once

#include <cstddef>
#include <cstring>

namespace geartrain {

class RowCopy {
 public:
  RowCopy(char*, size_t row_bytes, int64_t) : row_bytes_(row_bytes) {}
  void operator()(char* to, const char* from) const { std::memcpy(to, from, row_bytes_); }

 private:
  size_t row_bytes_;
};

}  // namespace geartrain
