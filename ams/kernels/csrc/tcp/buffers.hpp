// Pool of frame buffers, 64-byte aligned. A few are kept for the next frame: new pages cost more than the copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace geartrain {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes)
      : data_(static_cast<char*>(::operator new(bytes, std::align_val_t{64}))), bytes_(bytes) {}
  ~Buffer() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{64});
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Thread-safe.
class BufferPool {
 public:
  BufferPool() { kept_.reserve(kMaxKept); }  // so that a release needs no memory
  // Returns a buffer of at least `bytes`. Throws std::bad_alloc.
  Buffer take(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      const auto fitting = std::find_if(kept_.begin(), kept_.end(), [&](const Buffer& one) {
        return one.bytes() >= bytes && one.bytes() / 4 <= std::max(bytes, kSmall);
      });
      if (fitting != kept_.end()) {
        Buffer found = std::move(*fitting);
        kept_.erase(fitting);
        return found;
      }
    }
    return Buffer(std::max(bytes + bytes / 8, kSmall));
  }
  void give_back(Buffer buffer) {
    if (buffer.data() == nullptr || buffer.bytes() > kMaxKeptBytes) return;
    const std::lock_guard lock(mutex_);
    if (kept_.size() == kMaxKept) kept_.erase(kept_.begin());
    kept_.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kSmall = size_t{16} << 10, kMaxKeptBytes = size_t{32} << 20, kMaxKept = 4;
  std::mutex mutex_;
  std::vector<Buffer> kept_;
};

}  // namespace geartrain
