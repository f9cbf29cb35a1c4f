// Connected byte stream, encrypted or not: all TCP reads and writes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "carriers/forks.hpp"
#include "tcp/tls.hpp"

namespace geartrain {

// Non-blocking, except wait().
class ByteStream {
 public:
  ByteStream() = default;
  // Takes a connected socket, and sets options for low latency and for detecting a dead peer within a minute. `tls`, of
  // that socket, encrypts the stream.
  explicit ByteStream(OwnedFd socket, std::unique_ptr<Tls> tls = nullptr);
  int fd() const { return socket_.get(); }
  // To be called first, and again on more input while false: until both ends have agreed on keys. Throws
  // std::runtime_error.
  bool shake_hands() { return !tls_ || tls_->shake_hands(); }
  // Bytes read or written, at least 1; 0 if it would block. Throw std::system_error, or its parent std::runtime_error
  // when the peer has closed it.
  size_t read(char* to, size_t most_bytes);
  size_t write(const char* from, size_t bytes);
  // Whether there may be buffered input, which poll and epoll do not report.
  bool has_buffered() const { return tls_ && tls_->has_buffered(); }
  // Waits until it is readable, or (`for_writing`) writable, or so many milliseconds (-1: any number) are over. Returns
  // whether it is readable.
  bool wait(bool for_writing, int millis) const;
  // Identity of the peer's machine: its address, of IPv6 the network half; empty if it has gone.
  std::string host() const;
  // Address for people; empty if it has gone.
  std::string address() const;
  // Whether the peer has closed it, though there may be more to read.
  bool has_ended() const;
  // Shuts down both directions; the descriptor stays.
  void end();

 private:
  OwnedFd socket_;
  std::unique_ptr<Tls> tls_;
};

// Socket that listens at a name or address, `port` 0: a free one; at all addresses of both protocols if `host` is "::".
// Throws std::system_error, std::runtime_error for an unknown name.
OwnedFd listen_stream(const char* host, unsigned short port, unsigned short* bound_port);
// Connected socket. Throws the same.
OwnedFd connect_stream(const char* host, unsigned short port, double timeout_seconds);

}  // namespace geartrain
