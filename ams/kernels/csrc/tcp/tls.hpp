// TLS 1.3 over a non-blocking socket, with the system's OpenSSL 3, loaded on first use.
//
// Both ends know the secret of an offer: its first half identifies it and is sent in the clear, its second is the key
// (an external PSK with ECDHE, RFC 8446 section 4.2.9). So there are no certificates, and an eavesdropper learns
// nothing, then or later.
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
  // Returns the secret that begins with these bytes, or an empty string. Called in shake_hands().
  using Find = std::function<std::string(std::string_view name)>;
  // Most records under one key of AES-GCM: RFC 8446 section 5.5 allows 2^24.5.
  static constexpr size_t kMaxRecords = size_t{1} << 23;

  // Throws the Fault ConfigError unless OpenSSL 3 is installed.
  static void load();
  // Makes one end of a connection over `socket`, which stays the caller's. Throws as load() does, and
  // std::runtime_error.
  static std::unique_ptr<Tls> client(int socket, std::string secret, size_t max_records = kMaxRecords);
  static std::unique_ptr<Tls> server(int socket, Find find);
  ~Tls();

  // To be called again while false: the peer has more to send. Throws std::runtime_error, as read and write do: the
  // peer does not know the secret, speaks another protocol, or has gone.
  bool shake_hands();
  // As those of ByteStream; may return 0 though there is input. Pass unwritten bytes again: some may be encrypted
  // already.
  size_t read(char* to, size_t most_bytes);
  size_t write(const char* from, size_t bytes);
  // Whether there may be buffered input.
  bool has_buffered() const { return has_buffered_; }

 private:
  friend struct TlsCallbacks;
  Tls(int socket, std::string secret, Find find, size_t max_records);
  bool is_done(int result);
  void encrypt(const char* from, size_t bytes);
  int flush();

  const int socket_;
  const std::string secret_;  // client's
  const Find find_;           // server's
  const size_t max_records_;
  const uint64_t generation_;
  std::mutex mutex_;
  ssl_st* ssl_;
  bool is_waiting_ = false;  // OpenSSL wanted input, and there was none
  // bounds the reads of one call: a peer could send only records that OpenSSL keeps to itself
  int reads_left_ = 0;
  size_t num_records_ = 0;   // encrypted
  // Encrypted bytes to be sent, several records at once: a system call takes longer than a record does. The number of
  // their plain bytes, and how many of those write() has reported as written.
  std::vector<char> out_;
  size_t sent_ = 0, taken_ = 0, told_ = 0;
  std::atomic<bool> has_buffered_ = false;
};

}  // namespace geartrain
