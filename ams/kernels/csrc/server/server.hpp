// Data plane of one shard: a thread that receives and performs requests, and one that greets new clients.
//
// A client shows a secret that the shard gave it before (gRPC: OpenDataPlane), valid for one connection and a few
// seconds. A client that violates the frame or mailbox format is disconnected; its mailboxes are freed once no call
// uses them, and requests that have not begun are dropped.
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

#include "calls/grant.hpp"
#include "ring/ring_peer.hpp"
#include "ring/spinning.hpp"
#include "server/greeter.hpp"
#include "tcp/tcp_peer.hpp"

namespace geartrain {

struct ServerLimits {
  size_t max_mailboxes = 1024, max_connections = 1024;
  double greeting_seconds = 5;  // for a client to connect and show the secret
  double silence_seconds = 30;  // of a client that neither sends the rest of a frame nor receives its replies
  // how long the thread polls for a request of this machine before it sleeps, where that pays
  double spin_seconds = 50e-6;
  size_t max_frame_bytes = kMaxCallBytes, most_bytes = size_t{2} << 30;  // by TCP: of one frame, and of all in flight
  size_t max_received_bytes = size_t{128} << 20;  // by TCP: of large requests in flight; a single one may be larger
  bool uses_tls = false;                           // by TCP: all connections must be encrypted
};

struct DataPlaneOffer {
  std::string socket;  // name in the abstract namespace
  std::string secret;
  uint16_t port = 0;  // of TCP; 0: none
};

// Thread-safe.
class DataServer : private OtherCallers {
 public:
  // Listens for clients of this machine, and on TCP at `host` and `port` (0: a free one) unless `host` is empty. Throws
  // std::system_error, and the errors of Tls::load(). `warn` is called by a thread of the server with messages for an
  // operator.
  DataServer(std::shared_ptr<Handler> handler, ServerLimits limits, const std::string& host = "", uint16_t port = 0,
             Greeter::Warn warn = nullptr);
  ~DataServer() override;
  // Offers a connection with all rights, or those of `grant`. Throws std::runtime_error: closed, or too many
  // connections.
  DataPlaneOffer offer(std::shared_ptr<Grant> grant = nullptr);
  // Ends the threads and all connections. Idempotent.
  void close();
  size_t num_connections() const { return *num_connections_; }
  size_t num_mailboxes() const { return mailboxes_->now; }

 private:
  using Clock = std::chrono::steady_clock;
  // Ends a connection, and uncounts it.
  struct Leave {
    std::shared_ptr<std::atomic<size_t>> count;
    template <class Peer>
    void operator()(Peer* peer) const {
      delete peer;
      --*count;
    }
  };
  template <class Peer>
  using Connected = std::unique_ptr<Peer, Leave>;

  void run();
  bool serve_requests();
  bool serve_held_streams();
  void let_streams_in();
  void sort_waiting_streams();
  bool is_memory_wanted() const;
  bool has_requests() const;
  bool is_asked() override;
  void serve_pulls(bool has_turn) noexcept override;
  void look_at_sockets(int timeout_millis);
  void look_at(int fd, uint32_t events);
  template <class Peer, class... Arguments>
  Connected<Peer> connected(Arguments&&... arguments);
  void welcome(std::shared_ptr<Handler> handler, OwnedFd socket, const OwnedFd& page, ByteStream stream);
  void take_arrivals();
  void serve_stream(TcpPeer& peer, uint32_t events);
  void flush_streams();
  void remember(std::shared_ptr<ServedCall> call);
  void expire();
  int millis_to_wait() const;
  void watch(int fd);

  const std::shared_ptr<Handler> handler_;
  const ServerLimits limits_;
  std::string name_;
  OwnedFd epoll_, sleep_file_;
  std::shared_ptr<OwnedFd> wake_;
  uint16_t port_ = 0;
  SharedMapping sleep_page_;
  std::shared_ptr<MailboxCount> mailboxes_ = std::make_shared<MailboxCount>();
  std::shared_ptr<FrameMemory> memory_ = std::make_shared<FrameMemory>();
  // Used by the thread. Clients may come and go while a request is performed, but not the client of that request.
  std::map<int, Connected<RingPeer>> rings_;
  std::map<int, Connected<TcpPeer>> streams_;
  bool have_streams_held_ = false;
  std::vector<int> waiting_streams_;  // streams that wait for memory, in order of arrival
  ServingTurn serving_{.others = this};
  std::vector<std::pair<Clock::time_point, std::shared_ptr<ServedCall>>> waiting_;
  Clock::time_point looked_at_;
  Spinning spinning_{limits_.spin_seconds};

  const std::shared_ptr<std::atomic<size_t>> num_connections_ = std::make_shared<std::atomic<size_t>>(0);
  std::atomic<bool> is_closing_ = false;
  std::atomic<bool> has_grants_ = false;  // whether connections may lose their rights without an event of their sockets
  std::mutex mutex_;  // guards what follows
  std::vector<Connected<RingPeer>> new_rings_;  // greeted
  std::vector<Connected<TcpPeer>> new_streams_;
  const uint64_t generation_ = fork_generation();
  std::thread* thread_ = nullptr;  // never joined in a forked child, which does not have it
  std::unique_ptr<Greeter> greeter_;
};

}  // namespace geartrain
