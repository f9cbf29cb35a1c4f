// TLS 1.3 over a socket that does not block, by OpenSSL 3 of the system, which is loaded when it is first wanted.
//
// Both ends know the secret of an offer: its first half names it and is seen on the way, its second is the key (an external PSK
// with ECDHE, RFC 8446 section 4.2.9), so there are no certificates, and who listens or records learns nothing, then or later.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

struct ssl_st;

namespace geartrain {

// Thread-safe: OpenSSL's is not, and a client reads and writes at once.
class Tls {
 public:
  // The secret that begins with so many bytes, or an empty string. Asked in shake_hands().
  using Find = std::function<std::string(std::string_view name)>;
  // Under one key of AES-GCM that an attacker sees: RFC 8446 section 5.5 allows 2^24.5.
  static constexpr size_t kMostRecords = size_t{1} << 23;

  // Throws the Fault ConfigError unless OpenSSL 3 is there.
  static void load();
  // An end of a connection over `socket`, which stays the caller's. Throws as load() does, and std::runtime_error.
  static std::unique_ptr<Tls> client(int socket, std::string secret, size_t most_records = kMostRecords);
  static std::unique_ptr<Tls> server(int socket, Find find);
  ~Tls();

  // To be asked again while false: the other end has more to say. It throws std::runtime_error, as read and write do: the other end
  // does not know the secret, speaks something else, or has gone.
  bool shake_hands();
  // As those of ByteStream; 0 may be read though more has come. What was not written is to be given again: some of it may be
  // encrypted already.
  size_t read(char* to, size_t most_bytes);
  size_t write(const char* from, size_t bytes);
  // Whether there may be more to read though nothing comes.
  bool has_buffered() const { return has_buffered_; }

 private:
  friend struct TlsCallbacks;
  Tls(int socket, std::string secret, Find find, size_t most_records);
  bool is_done(int result);
  void encrypt(const char* from, size_t bytes);
  int flush();

  const int socket_;
  const std::string secret_;  // of a client
  const Find find_;           // of a server
  const size_t most_records_;
  const uint64_t generation_;
  std::mutex mutex_;
  ssl_st* ssl_;
  bool is_waiting_ = false;  // OpenSSL wanted to read, and nothing had come
  int reads_left_ = 0;       // of the socket in this call, of which OpenSSL sees no end while what comes is for it alone
  size_t num_records_ = 0;   // encrypted
  // What is encrypted and to be sent, several records at once: a system call takes longer than a record does. Of the plain bytes that
  // it is of, how many there are, and how many of them write() has said to be written.
  std::vector<char> out_;
  size_t sent_ = 0, taken_ = 0, told_ = 0;
  std::atomic<bool> has_buffered_ = false;
};

}  // namespace geartrain
