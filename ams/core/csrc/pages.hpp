// Zeroed memory straight from the kernel: backed only where touched, in huge pages where it is large.
#pragma once

#include <cstddef>
#include <utility>

namespace geartrain {

class Pages {
 public:
  Pages() = default;
  // Throws std::bad_alloc if the kernel refuses; nothing is touched.
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  explicit operator bool() const { return data_ != nullptr; }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace geartrain
