#include "server/server.hpp"

#include <fcntl.h>
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
#include <functional>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "frames/frame.hpp"
#include "server/granted_handler.hpp"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace geartrain {
namespace {

constexpr int kListenLine = 64;
constexpr std::chrono::microseconds kLookInterval{200};  // between checks of sockets, while there are requests
constexpr std::chrono::milliseconds kGrantInterval{500};   // between checks of the connections' rights
constexpr int kSlowShare = 3;  // part of silence_seconds in which a client must move data if memory is wanted
constexpr double kPatienceShare = 0.8;                   // of the caller's time limit; then it is told to retry

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

}  // namespace

DataServer::DataServer(std::shared_ptr<Handler> handler, ServerLimits limits, const std::string& host, uint16_t port,
                       Greeter::Warn warn)
    : handler_(std::move(handler)), limits_(limits), name_("geartrain-" + hexadecimal(random_bytes(16))) {
  mailboxes_->most = limits.max_mailboxes;
  memory_->most = limits.most_bytes;
  memory_->max_frame = limits.max_frame_bytes;
  memory_->max_received = limits.max_received_bytes;
  OwnedFd near(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), far;
  if (!near) fail("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name_.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  const auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_.size());
  if (bind(near.get(), reinterpret_cast<sockaddr*>(&address), address_bytes) != 0) fail("bind");
  if (listen(near.get(), kListenLine) != 0) fail("listen");
  epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = std::make_shared<OwnedFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !*wake_) fail("epoll or eventfd");
  if (!host.empty()) far = listen_stream(host.c_str(), port, &port_);
  sleep_file_ = make_shared_file(kPageBytes);
  sleep_page_ = SharedMapping(sleep_file_.get(), kPageBytes, true);
  if (fcntl(sleep_file_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) fail("F_SEAL_FUTURE_WRITE");
  watch(wake_->get());
  greeter_ = std::make_unique<Greeter>(
      std::move(near), std::move(far), limits_.greeting_seconds, limits_.uses_tls,
      [this](std::shared_ptr<Handler> handler, OwnedFd socket, OwnedFd page, ByteStream stream) {
        welcome(std::move(handler), std::move(socket), page, std::move(stream));
      },
      std::move(warn));
  thread_ = begin_thread("geartrain-data", [this] { run(); });
}

DataServer::~DataServer() { close(); }

DataPlaneOffer DataServer::offer(std::shared_ptr<Grant> grant) {
  if (is_closing_) throw std::runtime_error("this server is shutting down");
  std::shared_ptr<Handler> handler = handler_;
  if (grant) {
    handler = std::make_shared<GrantedHandler>(handler_, std::move(grant));
    has_grants_ = true;
  }
  return {name_, greeter_->offer(std::move(handler), *num_connections_, limits_.max_connections), port_};
}

void DataServer::close() {
  if (generation_ != fork_generation()) return;
  std::thread* thread = nullptr;
  is_closing_ = true;
  greeter_->close();
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
  auto& is_asleep = reinterpret_cast<SleepPage*>(sleep_page_.data())->is_asleep;
  while (!is_closing_) {
    if (!waiting_streams_.empty()) let_streams_in();
    if (serve_requests()) {
      if (Clock::now() - looked_at_ >= kLookInterval) look_at_sockets(0);
      continue;
    }
    if (!rings_.empty() && spinning_.look([this] { return has_requests(); })) continue;
    is_asleep.store(1, std::memory_order_seq_cst);
    // A request sent before its client could see that the thread sleeps is found now; a later one wakes this thread.
    if (!has_requests()) look_at_sockets(millis_to_wait());
    is_asleep.store(0, std::memory_order_relaxed);
  }
  rings_.clear();
  streams_.clear();
  waiting_.clear();
  const std::lock_guard lock(mutex_);
  new_rings_.clear();
  new_streams_.clear();
}

bool DataServer::has_requests() const {
  return have_streams_held_ ||
         std::any_of(rings_.begin(), rings_.end(), [](const auto& one) { return one.second->has_requests(); });
}

// Serves one request of each client, so that none is served before another for ever. Returns whether there was any.
bool DataServer::serve_requests() {
  bool has_served = false;
  for (auto one = rings_.begin(); one != rings_.end();) {
    bool is_good = true;
    if (one->second->has_requests()) {
      has_served = true;
      is_good = one->second->serve([this](std::shared_ptr<ServedCall> call) { remember(std::move(call)); }, serving_);
    }
    one = is_good ? std::next(one) : rings_.erase(one);
  }
  if (have_streams_held_) has_served |= serve_held_streams();
  return has_served;
}

bool DataServer::serve_held_streams() {
  have_streams_held_ = false;
  std::vector<int> fds;
  for (const auto& [fd, peer] : streams_)
    if (!peer->is_ready()) continue;
    else if (peer->is_at_work() || (serving_.is_between() && peer->holds_request())) have_streams_held_ = true;
    else fds.push_back(fd);
  for (const int fd : fds)
    if (const auto stream = streams_.find(fd); stream != streams_.end()) serve_stream(*stream->second, EPOLLIN);
  return !fds.empty();
}

// First those whose machine uses the least memory, over all of its connections; then in order of arrival. A request
// that has waited too long is refused in any case.
void DataServer::let_streams_in() {
  const auto now = Clock::now();
  for (bool has_let_in = true; has_let_in;) {
    has_let_in = false;
    sort_waiting_streams();
    std::vector<int> left;
    for (const int fd : std::exchange(waiting_streams_, {})) {
      const auto stream = streams_.find(fd);
      if (stream == streams_.end() || !stream->second->waits_for_memory()) continue;
      const bool is_next = left.empty() && !has_let_in;
      if ((is_next || stream->second->waits_until() <= now) && stream->second->let_in()) {
        has_let_in = true;
        serve_stream(*stream->second, EPOLLIN);
      } else {
        left.push_back(fd);
      }
    }
    waiting_streams_.insert(waiting_streams_.begin(), left.begin(), left.end());  // before those that came meanwhile
  }
}

void DataServer::sort_waiting_streams() {
  if (waiting_streams_.size() < 2) return;
  std::unordered_map<std::string, size_t> received;
  for (const auto& [fd, peer] : streams_) received[peer->host()] += peer->received();
  const auto of = [&](int fd) {
    const auto stream = streams_.find(fd);
    return stream == streams_.end() ? 0 : received[stream->second->host()];
  };
  std::ranges::stable_sort(waiting_streams_, std::less<>(), of);
}

bool DataServer::is_asked() {
  return std::any_of(rings_.begin(), rings_.end(), [](const auto& one) { return one.second->may_be_brief(); }) ||
         Clock::now() - looked_at_ >= kLookInterval;
}

// A caller without memory for its request now retries.
void DataServer::serve_pulls(bool has_turn) noexcept {
  const ServingTurn outer = std::exchange(serving_, ServingTurn{.others = nullptr, .has_turn = has_turn});
  try {
    for (auto one = rings_.begin(); one != rings_.end();) {
      RingPeer& peer = *one->second;
      const bool is_good =
          !peer.may_be_brief() ||
          peer.serve([this](std::shared_ptr<ServedCall> call) { remember(std::move(call)); }, serving_);
      one = is_good ? std::next(one) : rings_.erase(one);
    }
    if (Clock::now() - looked_at_ >= kLookInterval) {
      look_at_sockets(0);
      if (have_streams_held_) serve_held_streams();
    }
  } catch (const std::exception&) {
  }
  serving_ = outer;
}

void DataServer::look_at_sockets(int timeout_millis) {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_millis);
  for (int i = 0; i < count; ++i)
    look_at(events[static_cast<size_t>(i)].data.fd, events[static_cast<size_t>(i)].events);
  expire();
  looked_at_ = Clock::now();
}

void DataServer::look_at(int fd, uint32_t events) {
  if (fd == wake_->get()) {
    eventfd_t value;
    eventfd_read(fd, &value);
    take_arrivals();
    flush_streams();
  } else if (const auto ring = rings_.find(fd); ring != rings_.end()) {
    if (ring->second->receive()) return;
    if (ring->second->is_at_work()) ring->second->go();
    else rings_.erase(ring);
  } else if (const auto stream = streams_.find(fd); stream != streams_.end()) {
    if (!stream->second->is_at_work()) serve_stream(*stream->second, events);
  }
}

template <class Peer, class... Arguments>
DataServer::Connected<Peer> DataServer::connected(Arguments&&... arguments) {
  auto peer = std::make_unique<Peer>(std::forward<Arguments>(arguments)...);
  ++*num_connections_;  // before the client learns of it
  return Connected<Peer>(peer.release(), Leave{num_connections_});
}

// Called by the greeter's thread: greets a valid client, and passes it to this server's thread.
void DataServer::welcome(std::shared_ptr<Handler> handler, OwnedFd socket, const OwnedFd& page, ByteStream stream) {
  if (socket && !page) return;
  std::array<char, sizeof(FrameHeader)> answer;
  write_header(answer.data(), {.kind = FrameKind::hello});
  if (socket) {
    auto peer = connected<RingPeer>(std::move(handler), std::move(socket), page, mailboxes_);
    if (!send_packet(peer->fd(), answer.data(), answer.size(), sleep_file_.get())) return;
    const std::lock_guard lock(mutex_);
    new_rings_.push_back(std::move(peer));
  } else {
    auto peer = connected<TcpPeer>(std::move(handler), std::move(stream), memory_, wake_);
    if (!peer->greet(answer.data(), answer.size())) return;
    const std::lock_guard lock(mutex_);
    new_streams_.push_back(std::move(peer));
  }
  eventfd_write(wake_->get(), 1);
}

void DataServer::take_arrivals() {
  const std::lock_guard lock(mutex_);
  const auto take = [this](auto& arrivals, auto& peers) {
    for (auto& one : arrivals) {
      const int fd = one->fd();
      try {
        peers.insert_or_assign(fd, std::move(one));
        watch(fd);
      } catch (const std::exception&) {  // the system has no memory for it
        peers.erase(fd);
      }
    }
    arrivals.clear();
  };
  for (const auto& one : new_streams_) have_streams_held_ |= one->is_ready();  // requests may have come with its hello
  take(new_rings_, rings_);
  take(new_streams_, streams_);
}

void DataServer::remember(std::shared_ptr<ServedCall> call) {
  const double seconds = std::min(call->seconds() * kPatienceShare, 1e6);
  if (seconds <= 0) return;
  try {
    waiting_.emplace_back(Clock::now() + duration_of(seconds), std::move(call));
  } catch (const std::bad_alloc&) {  // the caller's time limit ends its wait
  }
}

void DataServer::serve_stream(TcpPeer& peer, uint32_t events) {
  const int fd = peer.fd();
  const bool has_waited = peer.waits_for_memory();
  bool is_good = true;
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0 && (peer.holds_request() || !peer.is_full()))
    is_good = peer.receive([this](std::shared_ptr<ServedCall> call) { remember(std::move(call)); }, serving_);
  if (!is_good || !peer.flush()) {
    if (!peer.is_at_work()) streams_.erase(fd);
    return;
  }
  have_streams_held_ |= peer.is_ready();
  if (peer.waits_for_memory() && !has_waited) waiting_streams_.push_back(fd);
  epoll_event event{};
  event.events =
      (peer.is_full() || peer.holds_request() || peer.waits_for_memory() ? 0u : static_cast<uint32_t>(EPOLLIN)) |
      (peer.has_replies() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  event.data.fd = fd;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

// Sends replies that other threads have added.
void DataServer::flush_streams() {
  for (auto one = streams_.begin(); one != streams_.end();) {
    TcpPeer& peer = *(one++)->second;
    if (peer.has_replies()) serve_stream(peer, EPOLLOUT);
  }
}

// Whether a client lacks memory, or soon will.
bool DataServer::is_memory_wanted() const { return memory_->num_waiting != 0 || memory_->used > memory_->most / 2; }

// Ends connections that have lost their rights, are unresponsive, or are slow while others want their memory; answers
// callers near their time limit that other ranks are still awaited.
void DataServer::expire() {
  const auto now = Clock::now();
  const auto silence = duration_of(limits_.silence_seconds), patience = silence / kSlowShare;
  const bool is_wanted = is_memory_wanted(), of_requests = memory_->used <= memory_->most / 2;
  const bool was_away = now - looked_at_ > patience / 5;  // this thread was busy, and could receive nothing
  std::erase_if(streams_, [&](const auto& one) {
    TcpPeer& peer = *one.second;
    if (peer.is_at_work()) return false;
    if (!is_wanted || was_away) peer.forgive();
    return peer.is_over() || peer.is_silent_since(now - silence) ||
           (is_wanted && peer.is_slow(of_requests, now, patience));
  });
  std::erase_if(rings_, [](const auto& one) {
    RingPeer& peer = *one.second;
    if (peer.is_over() && peer.is_at_work()) peer.go();
    return peer.is_over() && !peer.is_at_work();
  });
  std::erase_if(waiting_, [&](const auto& one) {
    if (one.first <= now) one.second->answer_now();
    return !one.second->is_waiting();
  });
}

int DataServer::millis_to_wait() const {
  if (waiting_.empty() && streams_.empty() && !has_grants_) return -1;
  auto first = has_grants_ ? Clock::now() + kGrantInterval : Clock::time_point::max();
  for (const auto& [until, call] : waiting_) first = std::min(first, until);
  if (!streams_.empty()) {
    const double seconds = is_memory_wanted() ? limits_.silence_seconds / kSlowShare / 20 : limits_.silence_seconds / 2;
    first = std::min(first, Clock::now() + duration_of(seconds));
  }
  for (const int fd : waiting_streams_)
    if (const auto stream = streams_.find(fd); stream != streams_.end() && stream->second->waits_for_memory())
      first = std::min(first, stream->second->waits_until());
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(first - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60'000));
}

}  // namespace geartrain
