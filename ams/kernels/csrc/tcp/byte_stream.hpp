// A connected stream of bytes, encrypted or not. All reading and writing of TCP goes through here.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "carriers/forks.hpp"
#include "tcp/tls.hpp"

namespace geartrain {

// Never blocks, but in wait().
class ByteStream {
 public:
  ByteStream() = default;
  // Takes a connected socket, and sets what keeps it quick and finds out in a minute that the way to the other end is gone. `tls`, of
  // that socket, encrypts what goes over it.
  explicit ByteStream(OwnedFd socket, std::unique_ptr<Tls> tls = nullptr);
  int fd() const { return socket_.get(); }
  // Before all else, and again while false, once more has come: until both ends have agreed on keys. Throws std::runtime_error.
  bool shake_hands() { return !tls_ || tls_->shake_hands(); }
  // Bytes read or written, at least 1; 0 if none can be now. Throw std::system_error, or its parent std::runtime_error when
  // the other end has ended it.
  size_t read(char* to, size_t most_bytes);
  size_t write(const char* from, size_t bytes);
  // Whether there may be more to read already, of which poll and epoll say nothing.
  bool has_buffered() const { return tls_ && tls_->has_buffered(); }
  // Until something can be read, or (`for_writing`) written, or so many milliseconds (-1: any number) are over. Whether it can be read.
  bool wait(bool for_writing, int millis) const;
  // What tells the machine of the other end from others: its address, or of one of IPv6 the network's half; empty if it has gone.
  std::string host() const;
  // For people; empty if it has gone.
  std::string address() const;
  // Whether the other end has ended it, though there may be more to read.
  bool has_ended() const;
  // Ends it in both directions; the descriptor stays.
  void end();

 private:
  OwnedFd socket_;
  std::unique_ptr<Tls> tls_;
};

// A socket that listens at a name or an address, `port` 0: at a free one; all addresses of both protocols where `host` is "::".
// Throws std::system_error, std::runtime_error for a name that nobody knows.
OwnedFd listen_stream(const char* host, unsigned short port, unsigned short* bound_port);
// A connected socket. Throws as that does.
OwnedFd connect_stream(const char* host, unsigned short port, double timeout_seconds);

}  // namespace geartrain
