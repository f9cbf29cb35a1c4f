#include "tcp/tls.hpp"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "calls/call.hpp"
#include "carriers/forks.hpp"
#include "frames/frame.hpp"

struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_session_st;
struct ssl_cipher_st;
struct evp_md_st;
struct bio_st;
struct bio_method_st;

namespace geartrain {
namespace {

using UseSession = int (*)(ssl_st*, const evp_md_st*, const unsigned char** name, size_t* name_bytes, ssl_session_st**);
using FindSession = int (*)(ssl_st*, const unsigned char* name, size_t name_bytes, ssl_session_st**);

// Functions used of libssl.so.3 and of libcrypto.so.3, which it loads: the interface of every OpenSSL 3, as its SONAME
// promises.
#define GEARTRAIN_OF_OPENSSL(f)                                                         \
  f(int, OPENSSL_init_ssl, (uint64_t, const void*))                                     \
  f(const ssl_method_st*, TLS_method, ())                                               \
  f(ssl_ctx_st*, SSL_CTX_new, (const ssl_method_st*))                                   \
  f(long, SSL_CTX_ctrl, (ssl_ctx_st*, int, long, void*))                                \
  f(uint64_t, SSL_CTX_set_options, (ssl_ctx_st*, uint64_t))                             \
  f(uint64_t, SSL_CTX_clear_options, (ssl_ctx_st*, uint64_t))                           \
  f(int, SSL_CTX_set_ciphersuites, (ssl_ctx_st*, const char*))                          \
  f(int, SSL_CTX_set_num_tickets, (ssl_ctx_st*, size_t))                                \
  f(void, SSL_CTX_set_default_read_buffer_len, (ssl_ctx_st*, size_t))                   \
  f(void, SSL_CTX_set_psk_use_session_callback, (ssl_ctx_st*, UseSession))              \
  f(void, SSL_CTX_set_psk_find_session_callback, (ssl_ctx_st*, FindSession))            \
  f(ssl_session_st*, SSL_SESSION_new, ())                                               \
  f(void, SSL_SESSION_free, (ssl_session_st*))                                          \
  f(int, SSL_SESSION_set1_master_key, (ssl_session_st*, const unsigned char*, size_t))  \
  f(int, SSL_SESSION_set_cipher, (ssl_session_st*, const ssl_cipher_st*))               \
  f(int, SSL_SESSION_set_protocol_version, (ssl_session_st*, int))                      \
  f(const ssl_cipher_st*, SSL_CIPHER_find, (ssl_st*, const unsigned char*))             \
  f(ssl_st*, SSL_new, (ssl_ctx_st*))                                                    \
  f(void, SSL_free, (ssl_st*))                                                          \
  f(int, SSL_set_ex_data, (ssl_st*, int, void*))                                        \
  f(void*, SSL_get_ex_data, (const ssl_st*, int))                                       \
  f(void, SSL_set_bio, (ssl_st*, bio_st*, bio_st*))                                     \
  f(void, SSL_set_verify, (ssl_st*, int, void*))                                        \
  f(void, SSL_set_accept_state, (ssl_st*))                                              \
  f(void, SSL_set_connect_state, (ssl_st*))                                             \
  f(int, SSL_do_handshake, (ssl_st*))                                                   \
  f(int, SSL_session_reused, (const ssl_st*))                                           \
  f(int, SSL_read_ex, (ssl_st*, void*, size_t, size_t*))                                \
  f(int, SSL_write_ex, (ssl_st*, const void*, size_t, size_t*))                         \
  f(int, SSL_has_pending, (const ssl_st*))                                              \
  f(int, SSL_key_update, (ssl_st*, int))                                                \
  f(bio_method_st*, BIO_meth_new, (int, const char*))                                   \
  f(int, BIO_meth_set_write, (bio_method_st*, int (*)(bio_st*, const char*, int)))      \
  f(int, BIO_meth_set_read, (bio_method_st*, int (*)(bio_st*, char*, int)))             \
  f(int, BIO_meth_set_ctrl, (bio_method_st*, long (*)(bio_st*, int, long, void*)))      \
  f(bio_st*, BIO_new, (const bio_method_st*))                                           \
  f(void, BIO_set_init, (bio_st*, int))                                                 \
  f(void, BIO_set_data, (bio_st*, void*))                                               \
  f(void*, BIO_get_data, (bio_st*))                                                     \
  f(void, BIO_set_flags, (bio_st*, int))                                                \
  f(void, BIO_clear_flags, (bio_st*, int))                                              \
  f(unsigned long, ERR_peek_last_error, ())                                                  \
  f(const char*, ERR_reason_error_string, (unsigned long))                              \
  f(void, ERR_clear_error, ())

constexpr uint64_t kNoAtExit = 0x00080000, kAllowNoEcdhe = 1u << 10, kNoTicket = 1u << 14;
constexpr long kReleaseBuffers = 0x10;
constexpr int kVerifyPeer = 1, kKeyUpdateNotRequested = 0;
constexpr int kSetMode = 33, kSetReadAhead = 41, kSetSessionCache = 44, kSetGroups = 92, kSetLeastVersion = 123,
              kSetMostVersion = 124;
constexpr long kTls13 = 0x0304;
constexpr int kBioReadAgain = 9, kBioFlags = 15, kBioFlush = 11;
constexpr size_t kNameBytes = kSecretBytes / 2;
constexpr size_t kRecordBytes = size_t{16} << 10, kMaxRecordBytes = kRecordBytes + 22;  // plain, and encrypted
constexpr size_t kMaxAtOnce = 4 * kRecordBytes, kMaxUnsent = 2 * kMaxAtOnce;
constexpr size_t kMaxKept = 2 * kRecordBytes;  // output buffer kept for the next write
constexpr int kMaxReads = 2;
constexpr size_t kReadBufferBytes = 4 * kMaxRecordBytes + 64;  // input of one read, with OpenSSL's alignment

struct OpenSsl {
#define GEARTRAIN_DECLARE(result, name, arguments) result(*name) arguments;
  GEARTRAIN_OF_OPENSSL(GEARTRAIN_DECLARE)
  ssl_ctx_st* context;    // never freed, nor is `socket`
  bio_method_st* socket;  // as OpenSSL's own, but writing to a closed connection raises no SIGPIPE

  OpenSsl();
};

const OpenSsl& openssl() {
  static const OpenSsl loaded;
  return loaded;
}

ssl_session_st* session_of(ssl_st* ssl, const std::string& secret) {
  const OpenSsl& o = openssl();
  constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
  ssl_session_st* session = o.SSL_SESSION_new();
  if (session == nullptr) return nullptr;
  const auto* key = reinterpret_cast<const unsigned char*>(secret.data()) + kNameBytes;
  if (o.SSL_SESSION_set1_master_key(session, key, kSecretBytes - kNameBytes) == 1 &&
      o.SSL_SESSION_set_cipher(session, o.SSL_CIPHER_find(ssl, kAes128GcmSha256)) == 1 &&
      o.SSL_SESSION_set_protocol_version(session, kTls13) == 1)
    return session;
  o.SSL_SESSION_free(session);
  return nullptr;
}

}  // namespace

// Called by OpenSSL, which does not support exceptions.
struct TlsCallbacks {
  static int use_session(ssl_st* ssl, const evp_md_st*, const unsigned char** name, size_t* name_bytes,
                         ssl_session_st** session) noexcept {
    const auto& tls = *static_cast<const Tls*>(openssl().SSL_get_ex_data(ssl, 0));
    *name = reinterpret_cast<const unsigned char*>(tls.secret_.data());
    *name_bytes = kNameBytes;
    return (*session = session_of(ssl, tls.secret_)) != nullptr;
  }
  // 1 without a session: the name is unknown.
  static int find_session(ssl_st* ssl, const unsigned char* name, size_t name_bytes,
                          ssl_session_st** session) noexcept {
    *session = nullptr;
    const auto& tls = *static_cast<const Tls*>(openssl().SSL_get_ex_data(ssl, 0));
    if (!tls.find_ || name_bytes != kNameBytes) return 1;
    try {
      const std::string secret = tls.find_({reinterpret_cast<const char*>(name), name_bytes});
      return secret.empty() || (*session = session_of(ssl, secret)) != nullptr;
    } catch (...) {
      return 0;
    }
  }
  static int write(bio_st* bio, const char* from, int bytes) noexcept {
    auto& out = static_cast<Tls*>(openssl().BIO_get_data(bio))->out_;
    try {
      if (out.size() > kMaxUnsent) return -1;  // the peer requests answers without end, and does not receive them
      out.insert(out.end(), from, from + bytes);
      return bytes;
    } catch (...) {
      return -1;
    }
  }
  static int read(bio_st* bio, char* to, int most_bytes) noexcept {
    const OpenSsl& o = openssl();
    Tls& tls = *static_cast<Tls*>(o.BIO_get_data(bio));
    o.BIO_clear_flags(bio, kBioFlags);
    for (bool is_over = tls.reads_left_-- <= 0;;) {
      const auto bytes = is_over ? -1 : recv(tls.socket_, to, static_cast<size_t>(most_bytes), 0);
      if (bytes >= 0) return static_cast<int>(bytes);
      if (!is_over && errno == EINTR) continue;
      tls.is_waiting_ = is_over || errno == EAGAIN || errno == EWOULDBLOCK;
      if (tls.is_waiting_) o.BIO_set_flags(bio, kBioReadAgain);
      return -1;
    }
  }
  static long control(bio_st*, int command, long, void*) noexcept { return command == kBioFlush; }
};

namespace {

OpenSsl::OpenSsl() {
  void* library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  const auto found = [&](const char* name) {
    void* address = library == nullptr ? nullptr : dlsym(library, name);
    if (address != nullptr) return address;
    const char* why = dlerror();
    throw Fault("ConfigError",
                "OpenSSL 3 of the system, which encrypts rows sent by TCP, cannot be loaded (" +
                    std::string(why == nullptr ? name : why) +
                    "); install it: 'apt install libssl3' (Debian, Ubuntu), 'dnf install openssl-libs' (Fedora, RHEL)");
  };
#define GEARTRAIN_LOAD(result, name, arguments) name = reinterpret_cast<result(*) arguments>(found(#name));
  GEARTRAIN_OF_OPENSSL(GEARTRAIN_LOAD)
  // The process may end while our threads still use OpenSSL.
  OPENSSL_init_ssl(kNoAtExit, nullptr);
  context = SSL_CTX_new(TLS_method());
  socket = BIO_meth_new(0x0400, "geartrain");  // a source and sink
  const bool is_good =
      context != nullptr && socket != nullptr && BIO_meth_set_write(socket, TlsCallbacks::write) == 1 &&
      BIO_meth_set_read(socket, TlsCallbacks::read) == 1 && BIO_meth_set_ctrl(socket, TlsCallbacks::control) == 1 &&
      SSL_CTX_ctrl(context, kSetLeastVersion, kTls13, nullptr) == 1 &&
      SSL_CTX_ctrl(context, kSetMostVersion, kTls13, nullptr) == 1 &&
      SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1 && SSL_CTX_set_num_tickets(context, 0) == 1;
  if (!is_good)
    throw Fault(
        "ConfigError",
        "OpenSSL of this system refuses TLS 1.3 with AES-128-GCM; allow both in its configuration (openssl.cnf)");
  char groups[] = "X25519:P-256";
  SSL_CTX_ctrl(context, kSetGroups, 0, groups);  // if it fails, the system's preference applies
  SSL_CTX_ctrl(context, kSetSessionCache, 0, nullptr);
  SSL_CTX_ctrl(context, kSetReadAhead, 1, nullptr);
  SSL_CTX_ctrl(context, kSetMode, kReleaseBuffers, nullptr);  // most connections are idle most of the time
  SSL_CTX_set_default_read_buffer_len(context, kReadBufferBytes);
  SSL_CTX_set_options(context, kNoTicket);
  SSL_CTX_clear_options(context, kAllowNoEcdhe);
  SSL_CTX_set_psk_use_session_callback(context, TlsCallbacks::use_session);
  SSL_CTX_set_psk_find_session_callback(context, TlsCallbacks::find_session);
}

}  // namespace

void Tls::load() { openssl(); }

std::unique_ptr<Tls> Tls::client(int socket, std::string secret, size_t max_records) {
  std::unique_ptr<Tls> made(new Tls(socket, std::move(secret), nullptr, max_records));
  openssl().SSL_set_connect_state(made->ssl_);
  openssl().SSL_set_verify(made->ssl_, kVerifyPeer, nullptr);  // no certificate is accepted
  return made;
}

std::unique_ptr<Tls> Tls::server(int socket, Find find) {
  std::unique_ptr<Tls> made(new Tls(socket, {}, std::move(find), kMaxRecords));
  openssl().SSL_set_accept_state(made->ssl_);
  return made;
}

Tls::Tls(int socket, std::string secret, Find find, size_t max_records)
    : socket_(socket),
      secret_(std::move(secret)),
      find_(std::move(find)),
      max_records_(max_records),
      generation_(fork_generation()),
      ssl_(openssl().SSL_new(openssl().context)) {
  const OpenSsl& o = openssl();
  bio_st* bio = ssl_ == nullptr ? nullptr : o.BIO_new(o.socket);
  if (bio == nullptr || o.SSL_set_ex_data(ssl_, 0, this) != 1) throw std::bad_alloc();
  o.BIO_set_data(bio, this);
  o.BIO_set_init(bio, 1);
  o.SSL_set_bio(ssl_, bio, bio);
}

// Not freed in a forked child: a thread of its parent may have been using it.
Tls::~Tls() {
  if (generation_ == fork_generation()) openssl().SSL_free(ssl_);
}

// Returns whether a call of OpenSSL is done; false: it needs more input. Throws.
bool Tls::is_done(int result) {
  const bool is_waiting = std::exchange(is_waiting_, false);
  if (result == 1 || is_waiting) return result == 1;
  const OpenSsl& o = openssl();
  const char* reason = o.ERR_reason_error_string(o.ERR_peek_last_error());
  o.ERR_clear_error();
  throw std::runtime_error(reason == nullptr ? "the peer closed the connection" : std::string("TLS: ") + reason);
}

// Returns an error number, or 0. A reader may leave an error to the next call: earlier input is valid.
int Tls::flush() {
  while (sent_ < out_.size()) {
    const auto bytes = send(socket_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (bytes >= 0) sent_ += static_cast<size_t>(bytes);
    else if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    else if (errno != EINTR) return errno;
  }
  sent_ = 0;
  out_.clear();
  if (out_.capacity() > kMaxKept) out_.shrink_to_fit();
  return 0;
}

bool Tls::shake_hands() {
  const OpenSsl& o = openssl();
  const std::lock_guard lock(mutex_);
  reads_left_ = kMaxReads;
  const int result = o.SSL_do_handshake(ssl_);
  flush();
  if (!is_done(result)) return false;
  if (o.SSL_session_reused(ssl_) != 1) throw std::runtime_error("TLS: the peer does not use the secret");
  has_buffered_ = true;
  return true;
}

size_t Tls::read(char* to, size_t most_bytes) {
  const OpenSsl& o = openssl();
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  reads_left_ = kMaxReads;
  const int result = o.SSL_read_ex(ssl_, to, most_bytes, &bytes);
  has_buffered_ = result == 1 && o.SSL_has_pending(ssl_) == 1;
  flush();  // the input may have requested an answer
  return is_done(result) ? bytes : 0;
}

size_t Tls::write(const char* from, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const int error = flush()) throw std::system_error(error, std::generic_category(), "send");
  if (out_.empty() && told_ == taken_) {
    encrypt(from, std::min(bytes, kMaxAtOnce));
    flush();
  }
  const size_t unsent = (out_.size() - sent_ + kMaxRecordBytes - 1) / kMaxRecordBytes * kRecordBytes;
  const size_t done = std::max(taken_, told_ + unsent) - unsent;
  return done - std::exchange(told_, done);
}

void Tls::encrypt(const char* from, size_t bytes) {
  const OpenSsl& o = openssl();
  out_.reserve(bytes + (bytes / kRecordBytes + 2) * (kMaxRecordBytes - kRecordBytes));
  taken_ = told_ = 0;
  while (taken_ < bytes) {
    size_t taken = 0;
    if (!is_done(o.SSL_write_ex(ssl_, from + taken_, std::min(bytes - taken_, kRecordBytes), &taken)))
      throw std::runtime_error("TLS: the peer sent only the start of a message");
    taken_ += taken;
    if (++num_records_ % max_records_ == 0) o.SSL_key_update(ssl_, kKeyUpdateNotRequested);
  }
}

}  // namespace geartrain
