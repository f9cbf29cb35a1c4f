// Reader and writer of the pieces of requests and replies.
#pragma once

#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "frames/frame.hpp"

namespace geartrain {

inline constexpr size_t kMaxText = std::numeric_limits<uint16_t>::max();
inline constexpr size_t kMaxBytes = size_t{1} << 62;  // sums of a few of these do not overflow

[[noreturn]] inline void refuse(const std::string& what) {
  throw Fault("ProtocolError", "the frame is damaged: " + what);
}

inline void require_frame(bool condition, const char* what) {
  if (!condition) refuse(what);
}

inline constexpr size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Reads once: a process that shares the memory cannot change the value afterwards.
template <class T>
T copied(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  asm volatile("" : : "r"(&value) : "memory");
  return value;
}

template <class Header>
uint64_t checksum_of(uint64_t number, const Header& header) {
  return frame_checksum(number, reinterpret_cast<const char*>(&header), sizeof(Header) - sizeof(uint64_t));
}

// As Unicode defines it (table 3-7): no surrogates, no overlong forms.
bool is_utf8(std::string_view text);

// Bytes of one row. Throws the Fault ProtocolError.
size_t row_bytes_of(int64_t dim, DType dtype);

// Writes pieces one after the other.
class Writer {
 public:
  explicit Writer(char* at) : at_(at) {}
  // Null: another writer fills them.
  void put(const void* data, size_t bytes) {
    if (bytes != 0 && data != nullptr) std::memcpy(at_, data, bytes);
    at_ += bytes;
  }
  void zero_to(char* end) {
    std::memset(at_, 0, static_cast<size_t>(end - at_));
    at_ = end;
  }

 private:
  char* at_;
};

// Reads the pieces of a frame in order; refuses one that is cut off.
class Reader {
 public:
  Reader(const char* data, size_t bytes) : data_(data), bytes_(bytes) {}
  const char* take(size_t bytes, const char* what) {
    require_frame(bytes <= bytes_ - at_, what);
    const char* begin = data_ + at_;
    at_ += bytes;
    return begin;
  }
  void align(size_t to) { take(rounded_up(at_, to) - at_, "it ends too early"); }
  size_t left() const { return bytes_ - at_; }

 private:
  const char* data_;
  size_t bytes_, at_ = 0;
};

}  // namespace geartrain
