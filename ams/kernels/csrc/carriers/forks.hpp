// Descriptors and shared memory that a forked child must not have of its parent's: it would keep connections open that the parent's
// end should close, and write into memory that the parent works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace geartrain {

// Rises in every forked child.
uint64_t fork_generation();

// A descriptor that is closed with this object, and in every forked child at once.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd);  // -1: none
  ~OwnedFd() { close(); }
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  void close();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  uint64_t generation_ = 0;
};

// Memory of a file, shared with whoever else maps it; a forked child does not have it.
class SharedMapping {
 public:
  SharedMapping() = default;
  // Throws std::system_error.
  SharedMapping(int fd, size_t bytes, bool may_write);
  ~SharedMapping() { unmap(); }
  SharedMapping(SharedMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), generation_(other.generation_) {}
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void unmap();
  char* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t generation_ = 0;
};

}  // namespace geartrain
