// Thread that accepts connections to a shard's data plane and checks their secrets, so that they are accepted while the
// shard is busy.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>

#include "calls/handler.hpp"
#include "carriers/forks.hpp"
#include "carriers/hello.hpp"
#include "tcp/byte_stream.hpp"

namespace geartrain {

// Thread-safe.
class Greeter {
 public:
  // Called by the greeter's thread with a client that showed a valid secret: the handler of its offer, and a local
  // socket with the page that came with the secret, or a stream. An exception ends the connection.
  using Welcome =
      std::function<void(std::shared_ptr<Handler> handler, OwnedFd socket, OwnedFd page, ByteStream stream)>;
  // Called by that thread with warnings for an operator.
  using Warn = std::function<void(const std::string&)>;

  // Uses listening sockets; `far`: of TCP, or none. Clients must show their secret within so many seconds; over TCP
  // with `uses_tls` encrypted. Throws std::system_error, and the errors of Tls::load().
  Greeter(OwnedFd near, OwnedFd far, double greeting_seconds, bool uses_tls, Welcome welcome, Warn warn);
  ~Greeter();
  // Returns a secret for one connection served by `handler`, valid for the greeting's time. Throws std::runtime_error:
  // `most` are in use, `taken` by connections, the others by open offers.
  std::string offer(std::shared_ptr<Handler> handler, size_t taken, size_t most);
  // Stops the thread and closes the sockets. Idempotent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  struct Guest {
    OwnedFd socket;
    bool is_near;  // on this machine
    Clock::time_point until;
    Hello hello;
    size_t got = 0;
    ByteStream stream = {};  // owns the socket of a TCP guest that has sent something
  };

  struct Offer {
    Clock::time_point until;
    std::shared_ptr<Handler> handler;
  };

  void run();
  void accept_guests(const OwnedFd& listener);
  void make_room(bool is_near);
  void rest(int error);
  void refuse(int fd, const char* why) noexcept;
  void greet(int fd);
  std::shared_ptr<Handler> take_offer(const char* hello);
  std::string offered(std::string_view name);
  void watch(int fd, uint32_t events, int operation);
  int millis_to_wait() const;

  const Clock::duration greeting_;
  const bool uses_tls_;
  const Welcome welcome_;
  const Warn warn_;
  OwnedFd near_, far_, epoll_, wake_;
  // Used by the thread.
  std::unordered_map<int, Guest> guests_;
  Clock::time_point rests_until_ = Clock::time_point::min(), warned_at_ = Clock::time_point::min();
  bool is_resting_ = false;
  Clock::time_point told_of_refusal_at_ = Clock::time_point::min();
  size_t num_refused_ = 0;  // since then

  std::atomic<bool> is_closing_ = false;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, Offer> offers_;
  const uint64_t generation_ = fork_generation();
  std::thread* thread_ = nullptr;  // never joined in a forked child, which does not have it
};

// Starts a thread that receives no signals: their handlers are Python's, and run on other threads.
std::thread* begin_thread(const char* name, std::function<void()> work);

}  // namespace geartrain
