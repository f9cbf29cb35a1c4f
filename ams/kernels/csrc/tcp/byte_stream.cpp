#include "tcp/byte_stream.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const char* what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

void set(int socket, int level, int option, int value) { setsockopt(socket, level, option, &value, sizeof(value)); }

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Addresses addresses_of(const char* host, unsigned short port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int unknown = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (unknown != 0) throw std::runtime_error(std::string("no address of ") + host + ": " + gai_strerror(unknown));
  return Addresses(found, freeaddrinfo);
}

}  // namespace

ByteStream::ByteStream(OwnedFd socket, std::unique_ptr<Tls> tls) : socket_(std::move(socket)), tls_(std::move(tls)) {
  const int fd = socket_.get();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
}

size_t ByteStream::read(char* to, size_t most_bytes) {
  if (tls_) return tls_->read(to, most_bytes);
  for (;;) {
    const auto received = recv(fd(), to, most_bytes, 0);
    if (received > 0) return static_cast<size_t>(received);
    if (received == 0) throw std::runtime_error("the peer closed the connection");
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) fail("recv");
  }
}

size_t ByteStream::write(const char* from, size_t bytes) {
  if (tls_) return tls_->write(from, bytes);
  for (;;) {
    const auto sent = send(fd(), from, bytes, MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) fail("send");
  }
}

bool ByteStream::wait(bool for_writing, int millis) const {
  if (has_buffered()) return true;
  pollfd one{fd(), static_cast<short>(for_writing ? POLLIN | POLLOUT : POLLIN), 0};
  return poll(&one, 1, millis) > 0 && (one.revents & (POLLIN | POLLERR | POLLHUP)) != 0;
}

std::string ByteStream::host() const {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  if (getpeername(fd(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return {};
  if (address.ss_family == AF_INET)
    return {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in&>(address).sin_addr), sizeof(in_addr)};
  const auto& its = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  const auto* begin = reinterpret_cast<const char*>(&its);
  return IN6_IS_ADDR_V4MAPPED(&its) ? std::string(begin + 12, 4) : std::string(begin, 8);
}

std::string ByteStream::address() const {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  char host[NI_MAXHOST] = "";
  if (getpeername(fd(), reinterpret_cast<sockaddr*>(&address), &bytes) == 0)
    getnameinfo(reinterpret_cast<sockaddr*>(&address), bytes, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

bool ByteStream::has_ended() const {
  pollfd one{fd(), POLLRDHUP, 0};
  return poll(&one, 1, 0) > 0;
}

void ByteStream::end() { shutdown(fd(), SHUT_RDWR); }

OwnedFd listen_stream(const char* host, unsigned short port, unsigned short* bound_port) {
  const Addresses addresses = addresses_of(host, port);
  const addrinfo& first = *addresses;
  OwnedFd socket(::socket(first.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail("socket");
  set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  // as gRPC does
  if (first.ai_family == AF_INET6) set(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, std::string(host) != "::");
  if (bind(socket.get(), first.ai_addr, first.ai_addrlen) != 0) fail("cannot listen for connections for rows");
  if (listen(socket.get(), 128) != 0) fail("listen");
  sockaddr_storage bound{};
  socklen_t bytes = sizeof(bound);
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) != 0) fail("getsockname");
  *bound_port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                  : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  return socket;
}

OwnedFd connect_stream(const char* host, unsigned short port, double timeout_seconds) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  const Addresses addresses = addresses_of(host, port);
  int error = ETIMEDOUT;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    OwnedFd socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) fail("socket");
    if (connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0) return socket;
    error = errno;
    if (error != EINPROGRESS) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waited{socket.get(), POLLOUT, 0};
    error = ETIMEDOUT;
    if (left <= 0 || poll(&waited, 1, static_cast<int>(left)) != 1) continue;
    socklen_t bytes = sizeof(error);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0) return socket;
  }
  fail("cannot connect", error);
}

}  // namespace geartrain
