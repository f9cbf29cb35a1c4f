#include "server/server.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "frames/frame.hpp"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace geartrain {
namespace {

constexpr size_t kMostGuests = 64;                       // of each way at the same time: strangers may connect and say nothing
constexpr std::chrono::microseconds kLookInterval{200};  // at sockets, while there are requests
constexpr double kPatienceShare = 0.8;                   // of the time that a caller waits; then it is told to ask again

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) fail("getrandom");
  return bytes;
}

std::string hexadecimal(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::chrono::steady_clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

bool is_same_user(int fd) {
  ucred theirs{};
  socklen_t bytes = sizeof(theirs);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &theirs, &bytes) == 0 && theirs.uid == geteuid();
}

}  // namespace

DataServer::DataServer(std::shared_ptr<Handler> handler, ServerLimits limits, const std::string& host, uint16_t port)
    : handler_(std::move(handler)), limits_(limits), name_("geartrain-" + hexadecimal(random_bytes(16))) {
  mailboxes_->most = limits.most_mailboxes;
  memory_->most = limits.most_bytes;
  memory_->most_frame = limits.most_frame_bytes;
  memory_->most_received = limits.most_received_bytes;
  listener_ = OwnedFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_) fail("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name_.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  const auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_.size());
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), address_bytes) != 0) fail("bind");
  if (listen(listener_.get(), kMostGuests) != 0) fail("listen");
  epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = std::make_shared<OwnedFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !*wake_) fail("epoll or eventfd");
  if (!host.empty()) {
    tcp_listener_ = listen_stream(host.c_str(), port, &port_);
    watch(tcp_listener_.get());
  }
  sleep_file_ = make_shared_file(kPageBytes);
  sleep_page_ = SharedMapping(sleep_file_.get(), kPageBytes, true);
  if (fcntl(sleep_file_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) fail("F_SEAL_FUTURE_WRITE");
  watch(listener_.get());
  watch(wake_->get());
  // Signals are Python's, whose handlers run on other threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = new std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

DataServer::~DataServer() { close(); }

DataPlaneOffer DataServer::offer() {
  if (is_closing_) throw std::runtime_error("this server is ending");
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::erase_if(offers_, [&](const auto& one) { return one.second <= now; });
  if (num_connections_ + offers_.size() >= limits_.most_connections)
    throw std::runtime_error(std::to_string(limits_.most_connections) + " connections are taken already, the most of this shard");
  const std::string secret = random_bytes(kSecretBytes);
  offers_[secret] = now + duration_of(limits_.greeting_seconds);
  return {name_, secret, port_};
}

void DataServer::close() {
  if (generation_ != fork_generation()) return;
  std::thread* thread = nullptr;
  is_closing_ = true;
  {
    const std::lock_guard lock(mutex_);
    std::swap(thread, thread_);
  }
  if (thread == nullptr) return;
  eventfd_write(wake_->get(), 1);
  thread->join();
  delete thread;
}

void DataServer::watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
}

void DataServer::run() {
  pthread_setname_np(pthread_self(), "geartrain-data");
  auto& is_asleep = reinterpret_cast<SleepPage*>(sleep_page_.data())->is_asleep;
  while (!is_closing_) {
    if (!waiting_streams_.empty()) let_streams_in();
    if (serve_requests()) {
      if (Clock::now() - looked_at_ >= kLookInterval) look_at_sockets(0);
      continue;
    }
    if (!rings_.empty() && spinning_.look([this] { return has_requests(); })) continue;
    is_asleep.store(1, std::memory_order_seq_cst);
    // Whoever sent its request before it could see that is seen now; whoever sends it later wakes this thread.
    if (!has_requests()) look_at_sockets(millis_to_wait());
    is_asleep.store(0, std::memory_order_relaxed);
  }
  guests_.clear();
  rings_.clear();
  streams_.clear();
  waiting_.clear();
  num_connections_ = 0;
  listener_.close();
  tcp_listener_.close();
}

bool DataServer::has_requests() const {
  return have_streams_held_ || std::any_of(rings_.begin(), rings_.end(), [](const auto& one) { return one.second->has_requests(); });
}

// One of each client: none goes before another for ever. Returns whether there was any.
bool DataServer::serve_requests() {
  bool has_served = false;
  for (auto one = rings_.begin(); one != rings_.end();) {
    bool is_good = true;
    if (one->second->has_requests()) {
      has_served = true;
      is_good = one->second->serve(handler_, [this](std::shared_ptr<ServedCall> call) { remember(std::move(call)); }, moment_);
    }
    one = is_good ? std::next(one) : rings_.erase(one);
  }
  if (have_streams_held_) has_served |= serve_held_streams();
  num_connections_ = rings_.size() + streams_.size();
  return has_served;
}

bool DataServer::serve_held_streams() {
  have_streams_held_ = false;
  std::vector<int> fds;
  for (const auto& [fd, peer] : streams_)
    if (peer->holds_request()) fds.push_back(fd);
  for (const int fd : fds)
    if (const auto stream = streams_.find(fd); stream != streams_.end()) serve_stream(*stream->second, EPOLLIN);
  return !fds.empty();
}

// In the order in which they came. Who has waited for too long is refused wherever it stands.
void DataServer::let_streams_in() {
  const auto now = Clock::now();
  std::vector<int> left;
  for (const int fd : std::exchange(waiting_streams_, {})) {
    const auto stream = streams_.find(fd);
    if (stream == streams_.end() || !stream->second->waits_for_memory()) continue;
    if ((left.empty() || stream->second->waits_until() <= now) && stream->second->let_in())
      serve_stream(*stream->second, EPOLLIN);
    else
      left.push_back(fd);
  }
  waiting_streams_.insert(waiting_streams_.begin(), left.begin(), left.end());  // before those that came meanwhile
}

bool DataServer::is_asked() {
  return std::any_of(rings_.begin(), rings_.end(), [](const auto& one) { return one.second->may_be_brief(); }) ||
         Clock::now() - looked_at_ >= kLookInterval;
}

// Those who ask do so again if there is no memory for them now.
void DataServer::serve_pulls(bool has_turn) noexcept {
  const Moment outer = std::exchange(moment_, Moment{.meanwhile = nullptr, .has_turn = has_turn});
  try {
    for (auto one = rings_.begin(); one != rings_.end();) {
      RingPeer& peer = *one->second;
      const bool is_good = !peer.may_be_brief() ||
                           peer.serve(handler_, [this](std::shared_ptr<ServedCall> call) { remember(std::move(call)); }, moment_);
      one = is_good ? std::next(one) : rings_.erase(one);
    }
    if (Clock::now() - looked_at_ >= kLookInterval) look_at_sockets(0);
  } catch (const std::exception&) {
  }
  moment_ = outer;
}

void DataServer::look_at_sockets(int timeout_millis) {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_millis);
  for (int i = 0; i < count; ++i) look_at(events[static_cast<size_t>(i)].data.fd, events[static_cast<size_t>(i)].events);
  num_connections_ = rings_.size() + streams_.size();
  expire();
  looked_at_ = Clock::now();
}

void DataServer::look_at(int fd, uint32_t events) {
  if (fd == listener_.get()) {
    accept_guests(listener_);
  } else if (fd == tcp_listener_.get()) {
    accept_guests(tcp_listener_);
  } else if (fd == wake_->get()) {
    eventfd_t value;
    eventfd_read(fd, &value);
    flush_streams();
  } else if (const auto ring = rings_.find(fd); ring != rings_.end()) {
    if (ring->second->receive()) return;
    if (ring->second->is_at_work()) ring->second->go();
    else rings_.erase(ring);
  } else if (const auto stream = streams_.find(fd); stream != streams_.end()) {
    if (!stream->second->is_at_work()) serve_stream(*stream->second, events);
  } else if (guests_.contains(fd)) {
    greet(fd);
  }
}

void DataServer::accept_guests(const OwnedFd& listener) {
  for (;;) {
    OwnedFd socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    const bool is_near = &listener == &listener_;
    const auto others = std::ranges::count_if(guests_, [&](const auto& one) { return one.second.is_near == is_near; });
    if (static_cast<size_t>(others) >= kMostGuests || (is_near && !is_same_user(socket.get()))) continue;
    const int fd = socket.get();
    watch(fd);
    guests_.emplace(fd, Guest{std::move(socket), is_near, Clock::now() + duration_of(limits_.greeting_seconds), {}});
  }
}

// Takes a connection, if it shows the secret of an offer.
void DataServer::greet(int fd) {
  Guest& guest = guests_.at(fd);
  OwnedFd page;
  if (guest.is_near) {
    Packet packet = receive_packet(fd, guest.hello.data(), guest.hello.size());
    if (packet.bytes < 0) return;  // what was seen to come was for another that had this descriptor before
    guest.got = static_cast<size_t>(packet.bytes);
    page = std::move(packet.fd);
  } else {
    const auto received = recv(fd, guest.hello.data() + guest.got, guest.hello.size() - guest.got, 0);
    if (received > 0) guest.got += static_cast<size_t>(received);
    if (received > 0 ? guest.got < guest.hello.size() : received < 0 && errno == EAGAIN) return;  // the rest may come
  }
  Guest here = std::move(guest);
  guests_.erase(fd);
  if (here.got != here.hello.size() || !is_offered(here.hello.data())) return;
  try {
    if (!here.is_near) welcome_tcp(std::move(here.socket));
    else if (page) welcome_ring(std::move(here.socket), page);
  } catch (const std::exception&) {
    return;  // nobody whom we know
  }
  num_connections_ = rings_.size() + streams_.size();
}

bool DataServer::is_offered(const char* hello) {
  try {
    if (parse_header(hello, FrameKind::hello).body_bytes != kSecretBytes) return false;
  } catch (const Fault&) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  const auto offer = offers_.find(std::string(hello + sizeof(FrameHeader), kSecretBytes));
  if (offer == offers_.end()) return false;
  const bool is_in_time = offer->second > Clock::now();
  offers_.erase(offer);
  return is_in_time;
}

void DataServer::welcome_ring(OwnedFd socket, const OwnedFd& page) {
  const int fd = socket.get();
  rings_.emplace(fd, std::make_unique<RingPeer>(std::move(socket), page, mailboxes_));
  num_connections_ = rings_.size() + streams_.size();  // before the client knows
  std::array<char, sizeof(FrameHeader)> answer;
  write_header(answer.data(), {.kind = FrameKind::hello});
  if (!send_packet(fd, answer.data(), answer.size(), sleep_file_.get())) rings_.erase(fd);
}

void DataServer::welcome_tcp(OwnedFd socket) {
  const int fd = socket.get();
  ByteStream stream(std::move(socket));
  std::array<char, sizeof(FrameHeader)> answer;
  write_header(answer.data(), {.kind = FrameKind::hello});
  num_connections_ = rings_.size() + streams_.size() + 1;
  if (stream.write(answer.data(), answer.size()) != answer.size()) return;
  streams_.emplace(fd, std::make_unique<TcpPeer>(std::move(stream), memory_, wake_));
}

void DataServer::remember(std::shared_ptr<ServedCall> call) {
  const double seconds = std::min(call->seconds() * kPatienceShare, 1e6);
  if (seconds > 0) waiting_.emplace_back(Clock::now() + duration_of(seconds), std::move(call));
}

void DataServer::serve_stream(TcpPeer& peer, uint32_t events) {
  const int fd = peer.fd();
  const bool has_waited = peer.waits_for_memory();
  bool is_good = true;
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0 && (peer.holds_request() || !peer.is_full()))
    is_good = peer.receive(handler_, [this](std::shared_ptr<ServedCall> call) { remember(std::move(call)); }, moment_);
  if (!is_good || !peer.flush()) {
    if (!peer.is_at_work()) streams_.erase(fd);
    return;
  }
  have_streams_held_ |= peer.holds_request();
  if (peer.waits_for_memory() && !has_waited) waiting_streams_.push_back(fd);
  epoll_event event{};
  event.events = (peer.is_full() || peer.holds_request() || peer.waits_for_memory() ? 0u : static_cast<uint32_t>(EPOLLIN)) | (peer.has_replies() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  event.data.fd = fd;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

// Replies that other threads brought.
void DataServer::flush_streams() {
  for (auto one = streams_.begin(); one != streams_.end();) {
    TcpPeer& peer = *(one++)->second;
    if (peer.has_replies()) serve_stream(peer, EPOLLOUT);
  }
}

// Ends greetings that take too long; tells callers whose time is nearly over that others are waited for.
void DataServer::expire() {
  const auto now = Clock::now();
  std::erase_if(guests_, [&](const auto& one) { return one.second.until <= now; });
  const auto silent = now - duration_of(limits_.silence_seconds);
  std::erase_if(streams_, [&](const auto& one) { return !one.second->is_at_work() && one.second->is_silent_since(silent); });
  std::erase_if(waiting_, [&](const auto& one) {
    if (one.first <= now) one.second->answer_now();
    return !one.second->is_waiting();
  });
}

int DataServer::millis_to_wait() const {
  if (guests_.empty() && waiting_.empty() && streams_.empty()) return -1;
  auto first = Clock::time_point::max();
  for (const auto& [fd, guest] : guests_) first = std::min(first, guest.until);
  for (const auto& [until, call] : waiting_) first = std::min(first, until);
  if (!streams_.empty()) first = std::min(first, Clock::now() + duration_of(limits_.silence_seconds / 2));
  for (const int fd : waiting_streams_)
    if (const auto stream = streams_.find(fd); stream != streams_.end() && stream->second->waits_for_memory())
      first = std::min(first, stream->second->waits_until());
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(first - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60'000));
}

}  // namespace geartrain
