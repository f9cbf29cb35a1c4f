// The data plane of one shard: a thread that takes requests of its clients and performs them.
//
// A client shows a secret that the shard gave it beforehand (gRPC: OpenDataPlane); each is good for one connection and a few
// seconds. Whoever says what the frame or the mailboxes do not allow is disconnected; its mailboxes are let go of once no call uses
// them, and what it had asked for and was not begun never is.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "carriers/ring_peer.hpp"

namespace geartrain {

struct ServerLimits {
  size_t most_mailboxes = 1024, most_connections = 1024;
  double greeting_seconds = 5;  // to connect and show the secret
  double spin_seconds = 0;      // that the thread looks for more requests before it sleeps
};

struct DataPlaneOffer {
  std::string socket;  // name in the abstract namespace
  std::string secret;
};

// Thread-safe.
class DataServer {
 public:
  // Throws std::system_error.
  DataServer(std::shared_ptr<Handler> handler, ServerLimits limits);
  ~DataServer();
  // Throws std::runtime_error: closed, or too many connections.
  DataPlaneOffer offer();
  // Ends the thread and all connections. Idempotent.
  void close();
  size_t num_connections() const { return num_connections_; }
  size_t num_mailboxes() const { return mailboxes_->now; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Guest {
    OwnedFd socket;
    Clock::time_point until;
  };

  void run();
  bool serve_requests();
  bool has_requests() const;
  void look_at_sockets(int timeout_millis);
  void accept_guests();
  void greet(int fd);
  void expire();
  int millis_to_wait() const;
  void watch(int fd);

  const std::shared_ptr<Handler> handler_;
  const ServerLimits limits_;
  std::string name_;
  OwnedFd listener_, epoll_, wake_, sleep_file_;
  SharedMapping sleep_page_;
  std::shared_ptr<MailboxCount> mailboxes_ = std::make_shared<MailboxCount>();
  // Of the thread.
  std::unordered_map<int, Guest> guests_;
  std::unordered_map<int, std::unique_ptr<RingPeer>> peers_;
  std::vector<std::pair<Clock::time_point, std::shared_ptr<ServedCall>>> waiting_;
  Clock::time_point looked_at_;

  std::atomic<size_t> num_connections_ = 0;
  std::atomic<bool> is_closing_ = false;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, Clock::time_point> offers_;
  const uint64_t generation_ = fork_generation();
  std::thread* thread_ = nullptr;  // of a forked child it is not: it is left alone there
};

}  // namespace geartrain
