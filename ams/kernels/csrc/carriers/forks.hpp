// Descriptors and shared memory that a forked child must not inherit: it would keep connections open after the parent
// closes them, and write into the parent's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace geartrain {

// Returns a number that rises in every forked child.
uint64_t fork_generation();

// Descriptor that is closed with this object, and in every forked child at once.
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

// Mapped memory of a file, shared with other processes; a forked child does not have it.
class SharedMapping {
 public:
  SharedMapping() = default;
  // Throws std::system_error.
  SharedMapping(int fd, size_t bytes, bool may_write);
  ~SharedMapping() { unmap(); }
  SharedMapping(SharedMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        generation_(other.generation_) {}
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
