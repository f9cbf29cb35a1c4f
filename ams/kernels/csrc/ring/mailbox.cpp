#include "ring/mailbox.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace geartrain {
namespace {

constexpr int kTheirSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr size_t kBlockBytes = 512;  // unit of st_blocks

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void require_file(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("shared memory is refused: ") + what);
}

}  // namespace

void futex_wait(const std::atomic<MailboxState>& word, MailboxState value, int64_t nanoseconds) {
  const timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000),
                       static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, static_cast<uint32_t>(value), &limit, nullptr, 0);
}

void futex_wake(const std::atomic<MailboxState>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

OwnedFd make_shared_file(size_t bytes) {
  OwnedFd file(memfd_create("geartrain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) fail("memfd_create");
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate");
  int error;
  do error = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  while (error == EINTR);
  if (error != 0) throw std::system_error(error, std::generic_category(), "posix_fallocate");
  if (fcntl(file.get(), F_ADD_SEALS, kTheirSeals) != 0) fail("F_ADD_SEALS");
  return file;
}

SharedMapping map_their_file(int fd, size_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  require_file(seals >= 0 && (seals & kTheirSeals) == kTheirSeals, "it is not sealed (F_SEAL_SHRINK, F_SEAL_GROW)");
  struct stat status;
  require_file(fstat(fd, &status) == 0 && static_cast<size_t>(status.st_size) == bytes,
               "its size differs from its notice");
  struct statvfs system;
  require_file(fstatvfs(fd, &system) == 0 && system.f_bsize == static_cast<unsigned long>(sysconf(_SC_PAGESIZE)),
               "it is not of ordinary pages");
  SharedMapping mapping(fd, bytes, true);
  // Both have it mapped now. A hole punched later by the client would be filled at the shard's expense.
  fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
  require_file((fcntl(fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE) != 0, "it cannot be sealed (F_SEAL_FUTURE_WRITE)");
  require_file(fstat(fd, &status) == 0 && static_cast<size_t>(status.st_blocks) * kBlockBytes >= bytes,
               "it has holes: its memory was not allocated (fallocate)");
  return mapping;
}

bool is_same_user(int socket) {
  ucred theirs{};
  socklen_t bytes = sizeof(theirs);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &theirs, &bytes) == 0 && theirs.uid == geteuid();
}

bool send_packet(int socket, const void* data, size_t bytes, int fd) {
  iovec piece{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  while (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (errno != EINTR) fail("sendmsg");
  }
  return true;
}

Packet receive_packet(int socket, void* data, size_t most_bytes) {
  iovec piece{data, most_bytes};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  Packet packet;
  do packet.bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  while (packet.bytes < 0 && errno == EINTR);
  if (packet.bytes < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK) packet.bytes = 0;  // a reset counts as the end
    return packet;
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    // There may be more than one: padding has room for them.
    for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof(int));
      packet.fd = OwnedFd(fd);
    }
  }
  return packet;
}

}  // namespace geartrain
