#include "carriers/forks.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <unordered_set>

namespace geartrain {
namespace {

std::atomic<uint64_t> generation{1};

struct OpenFds {
  std::mutex mutex;
  std::unordered_set<int> fds;
};

// Never destroyed: threads may outlive static objects.
OpenFds& open_fds() {
  static OpenFds* const all = [] {
    auto* made = new OpenFds;
    pthread_atfork([] { open_fds().mutex.lock(); }, [] { open_fds().mutex.unlock(); },
                   [] {
                     generation.fetch_add(1);
                     for (const int fd : open_fds().fds) ::close(fd);
                     open_fds().fds.clear();
                     open_fds().mutex.unlock();
                   });
    return made;
  }();
  return *all;
}

}  // namespace

uint64_t fork_generation() { return generation.load(std::memory_order_relaxed); }

OwnedFd::OwnedFd(int fd) : fd_(fd), generation_(fork_generation()) {
  if (fd < 0) return;
  OpenFds& all = open_fds();
  const std::lock_guard lock(all.mutex);
  all.fds.insert(fd);
}

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  close();
  fd_ = std::exchange(other.fd_, -1);
  generation_ = other.generation_;
  return *this;
}

void OwnedFd::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || generation_ != fork_generation()) return;  // in a child, the number may be another descriptor's
  OpenFds& all = open_fds();
  const std::lock_guard lock(all.mutex);
  all.fds.erase(fd);
  ::close(fd);
}

SharedMapping::SharedMapping(int fd, size_t bytes, bool may_write) : bytes_(bytes), generation_(fork_generation()) {
  void* mapped = mmap(nullptr, bytes, may_write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  data_ = static_cast<char*>(mapped);
  madvise(mapped, bytes, MADV_DONTFORK);
}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  unmap();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  generation_ = other.generation_;
  return *this;
}

void SharedMapping::unmap() {
  char* data = std::exchange(data_, nullptr);
  if (data != nullptr && generation_ == fork_generation()) munmap(data, bytes_);  // a child does not have the mapping
}

}  // namespace geartrain
