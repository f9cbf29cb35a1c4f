// Shared memory of a client and a shard on one machine: mailboxes, each of which carries one call at a time.
//
// A mailbox is a memory file made by the client: a control page, then room for the request and the reply. It has no
// name in any file system, all its memory is allocated at first, and it is sealed: by the client against any change of
// its size, by the shard against releasing memory, as a missing page is charged to the process that touches it next.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "carriers/forks.hpp"

namespace geartrain {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kMaxMailboxes = 64;  // of one client: as many as a word has bits
inline constexpr size_t kMaxMailboxBytes = size_t{3} << 30;  // room for the largest request and the largest reply

enum class MailboxState : uint32_t { free = 0, request = 1, busy = 2, reply = 3 };

// First page of a mailbox. Neither side trusts the other.
struct MailboxControl {
  std::atomic<MailboxState> state;
  std::atomic<uint32_t> is_awaited;  // the client sleeps on `state`
  std::atomic<uint64_t> request_bytes, reply_bytes;
};

// The client's page: which of its mailboxes hold requests.
struct RequestedPage {
  std::atomic<uint64_t> requested;  // a bit for each
};

// The shard's page, which is read-only to clients.
struct SleepPage {
  std::atomic<uint32_t> is_asleep;  // wake it by a Notice
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<MailboxState>::is_always_lock_free);

// Packets on the socket between them, after the hello. `added` comes with the mailbox's descriptor and is answered by
// the same packet, or by `refused`.
enum class NoticeKind : uint32_t { wake = 1, added = 2, closed = 3, refused = 4 };
struct Notice {
  NoticeKind kind = NoticeKind::wake;
  uint32_t mailbox = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;  // of their places
  uint64_t number = 0;                          // of an `added`; the answer repeats it
};

// Sleeps while `word` holds `value`, up to a time limit; wakes a process that sleeps on it.
void futex_wait(const std::atomic<MailboxState>& word, MailboxState value, int64_t nanoseconds);
void futex_wake(const std::atomic<MailboxState>& word);

// Makes a memory file of `bytes`, allocated, and sealed against any change of its size. Throws std::system_error.
OwnedFd make_shared_file(size_t bytes);
// Maps another process's file, and seals it. Throws std::runtime_error if it is not as make_shared_file makes it.
SharedMapping map_their_file(int fd, size_t bytes);

// Whether the peer of a local socket belongs to this user.
bool is_same_user(int socket);
// Sends or receives one packet with at most one descriptor. Send: false if it would block; throws std::system_error.
// Receive: bytes, 0 at the end of the connection, -1 if there is none now.
bool send_packet(int socket, const void* data, size_t bytes, int fd = -1);
struct Packet {
  long bytes = -1;
  OwnedFd fd;
};
Packet receive_packet(int socket, void* data, size_t most_bytes);

}  // namespace geartrain
