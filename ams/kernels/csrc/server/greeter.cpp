#include "server/greeter.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "ring/mailbox.hpp"

namespace geartrain {
namespace {

constexpr size_t kMaxGuests = 64;                 // of each kind at a time: strangers may connect and send nothing
constexpr std::chrono::milliseconds kRest{250};    // after a failed accept, until the next attempt
constexpr std::chrono::minutes kWarnInterval{1};

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::string words_of(int error) {
  std::string words = "the shard cannot accept a new connection for rows: " + std::generic_category().message(error);
  rlimit limit{};
  if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    words += "; this process may open at most " + std::to_string(limit.rlim_cur) +
             " files and connections: raise that (ulimit -n)";
  if (error == ENFILE) words += "; this is the limit of the whole machine: raise fs.file-max";
  return words + ". Open connections are served";
}

}  // namespace

std::thread* begin_thread(const char* name, std::function<void()> work) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread* thread = nullptr;
  try {
    thread = new std::thread([name, work = std::move(work)] {
      pthread_setname_np(pthread_self(), name);
      work();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

Greeter::Greeter(OwnedFd near, OwnedFd far, double greeting_seconds, bool uses_tls, Welcome welcome, Warn warn)
    : greeting_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(greeting_seconds))),
      uses_tls_(uses_tls),
      welcome_(std::move(welcome)),
      warn_(std::move(warn)),
      near_(std::move(near)),
      far_(std::move(far)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) fail("epoll or eventfd");
  if (uses_tls_) Tls::load();
  for (const OwnedFd* one : {&near_, &far_, &wake_})
    if (*one) watch(one->get(), EPOLLIN, EPOLL_CTL_ADD);
  thread_ = begin_thread("geartrain-greet", [this] { run(); });
}

Greeter::~Greeter() { close(); }

std::string Greeter::offer(std::shared_ptr<Handler> handler, size_t taken, size_t most) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::erase_if(offers_, [&](const auto& one) { return one.second.until <= now; });
  if (taken + offers_.size() >= most)
    throw std::runtime_error("this shard has " + std::to_string(most) + " connections already, the most it accepts");
  std::string secret(kSecretBytes, '\0');
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) fail("getrandom");
  offers_[secret] = {now + greeting_, std::move(handler)};
  return secret;
}

void Greeter::close() {
  if (generation_ != fork_generation()) return;
  std::thread* thread = nullptr;
  is_closing_ = true;
  {
    const std::lock_guard lock(mutex_);
    std::swap(thread, thread_);
  }
  if (thread == nullptr) return;
  eventfd_write(wake_.get(), 1);
  thread->join();
  delete thread;
}

void Greeter::watch(int fd, uint32_t events, int operation) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), operation, fd, &event) != 0) fail("epoll_ctl");
}

void Greeter::run() {
  std::array<epoll_event, 64> events;
  while (!is_closing_) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), millis_to_wait());
    const auto with_each = [&](const auto& work) {
      for (int i = 0; i < count; ++i) {
        const int fd = events[static_cast<size_t>(i)].data.fd;
        try {
          work(fd);
        } catch (const std::exception& error) {  // no valid secret, or no memory
          refuse(fd, error.what());
        }
      }
    };
    with_each([this](int fd) {  // first: old guests may have to make room for new ones
      if (guests_.contains(fd)) greet(fd);
    });
    with_each([this](int fd) {
      for (const OwnedFd* one : {&near_, &far_})
        if (fd == one->get()) accept_guests(*one);
    });
    const auto now = Clock::now();
    std::erase_if(guests_, [&](const auto& one) { return one.second.until <= now; });
    if (!is_resting_ || rests_until_ > now) continue;
    is_resting_ = false;
    for (const OwnedFd* one : {&near_, &far_})
      if (*one) watch(one->get(), EPOLLIN, EPOLL_CTL_MOD);
  }
  guests_.clear();
  near_.close();
  far_.close();
}

// Accepts as many guests as may be there at once; the others in the next turn.
void Greeter::accept_guests(const OwnedFd& listener) {
  for (size_t i = 0; i < kMaxGuests; ++i) {
    OwnedFd socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) rest(errno);
      return;
    }
    const bool is_near = &listener == &near_;
    if (is_near && !is_same_user(socket.get())) continue;
    make_room(is_near);
    const int fd = socket.get();
    watch(fd, EPOLLIN, EPOLL_CTL_ADD);
    guests_.emplace(fd, Guest{std::move(socket), is_near, Clock::now() + greeting_, {}});
  }
}

// Evicts the oldest guest for a new one: a genuine client sends its secret at once.
void Greeter::make_room(bool is_near) {
  size_t others = 0;
  auto oldest = guests_.end();
  for (auto one = guests_.begin(); one != guests_.end(); ++one) {
    if (one->second.is_near != is_near) continue;
    ++others;
    if (oldest == guests_.end() || one->second.until < oldest->second.until) oldest = one;
  }
  if (others >= kMaxGuests) guests_.erase(oldest);
}

// Pending connections would wake this thread without end, so it stops accepting for a while.
void Greeter::rest(int error) {
  const auto now = Clock::now();
  is_resting_ = true;
  rests_until_ = now + kRest;
  for (const OwnedFd* one : {&near_, &far_})
    if (*one) watch(one->get(), 0, EPOLL_CTL_MOD);
  if (warned_at_ != Clock::time_point::min() && now - warned_at_ < kWarnInterval) return;
  warned_at_ = now;
  if (warn_) warn_(words_of(error));
}

// With TLS, warns the operator, once a minute; not of guests that closed the connection, such as port probes.
void Greeter::refuse(int fd, const char* why) noexcept try {
  const auto guest = guests_.find(fd);
  if (guest == guests_.end()) return;
  const ByteStream stream = std::move(guest->second.stream);
  guests_.erase(guest);
  if (!uses_tls_ || !warn_ || stream.fd() < 0 || stream.has_ended()) return;
  ++num_refused_;
  const auto now = Clock::now();
  if (told_of_refusal_at_ != Clock::time_point::min() && now - told_of_refusal_at_ < kWarnInterval) return;
  told_of_refusal_at_ = now;
  warn_("connections for rows refused: " + std::to_string(std::exchange(num_refused_, 0)) + ", the last from " +
        stream.address() + ": " + why);
} catch (const std::exception&) {  // no memory for the message
}

// Accepts a connection if it shows the secret of an offer.
void Greeter::greet(int fd) {
  Guest& guest = guests_.at(fd);
  OwnedFd page;
  if (guest.is_near) {
    Packet packet = receive_packet(fd, guest.hello.data(), guest.hello.size());
    if (packet.bytes < 0) return;  // the event was for an earlier connection with this descriptor
    guest.got = static_cast<size_t>(packet.bytes);
    page = std::move(packet.fd);
  } else {
    if (guest.socket)
      guest.stream = ByteStream(std::move(guest.socket),
                                uses_tls_ ? Tls::server(fd, [this](auto name) { return offered(name); }) : nullptr);
    if (!guest.stream.shake_hands()) return;
    for (size_t received = 1; received != 0 && guest.got < guest.hello.size(); guest.got += received)
      received = guest.stream.read(guest.hello.data() + guest.got, guest.hello.size() - guest.got);
    if (guest.got < guest.hello.size()) return;  // the rest is still to come
  }
  std::shared_ptr<Handler> handler = guest.got == guest.hello.size() ? take_offer(guest.hello.data()) : nullptr;
  if (!handler) throw std::runtime_error("it does not show the secret of a valid offer");
  Guest here = std::move(guest);
  guests_.erase(fd);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  welcome_(std::move(handler), std::move(here.socket), std::move(page), std::move(here.stream));
}

// Returns the handler for a client that shows the secret of an offer, which is then used up; null: of no valid offer.
std::shared_ptr<Handler> Greeter::take_offer(const char* hello) {
  if (parse_header(hello, FrameKind::hello).body_bytes != kSecretBytes) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto offer = offers_.find(std::string(hello + sizeof(FrameHeader), kSecretBytes));
  if (offer == offers_.end()) return nullptr;
  const Offer taken = std::move(offer->second);
  offers_.erase(offer);
  return taken.until > Clock::now() ? taken.handler : nullptr;
}

// Returns the secret that begins with these bytes, if its offer is valid and not used up.
std::string Greeter::offered(std::string_view name) {
  const std::lock_guard lock(mutex_);
  const auto offer = offers_.lower_bound(std::string(name));
  return offer != offers_.end() && offer->first.starts_with(name) && offer->second.until > Clock::now() ? offer->first
                                                                                                        : std::string();
}

int Greeter::millis_to_wait() const {
  if (guests_.empty() && !is_resting_) return -1;
  auto first = is_resting_ ? rests_until_ : Clock::time_point::max();
  for (const auto& [fd, guest] : guests_) first = std::min(first, guest.until);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(first - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60'000));
}

}  // namespace geartrain
