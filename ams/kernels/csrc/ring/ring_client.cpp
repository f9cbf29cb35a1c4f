#include "ring/ring_client.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "carriers/hello.hpp"
#include "frames/frame.hpp"
#include "ring/mailbox.hpp"
#include "ring/spinning.hpp"

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Clock::duration kLookInterval = std::chrono::milliseconds(100);
// then checks whether the shard is still there
constexpr Clock::duration kLongestSleep = std::chrono::milliseconds(20);

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

constexpr double kMomentSeconds = 2e-3;  // time in which an idle shard answers

// Rounds up, so that calls of nearly the same size fit, too.
size_t roomy(size_t bytes) {
  const size_t step = std::max<size_t>(16 * kPageBytes, std::bit_floor(bytes) / 4);
  return (bytes + step - 1) / step * step;
}

struct Mailbox {
  Mailbox(uint32_t number, size_t request_room, size_t reply_room)
      : index(number),
        request_bytes(request_room),
        reply_bytes(reply_room),
        file(make_shared_file(bytes())),
        memory(file.get(), bytes(), true) {}
  size_t bytes() const { return kPageBytes + request_bytes + reply_bytes; }
  MailboxControl* control() const { return reinterpret_cast<MailboxControl*>(memory.data()); }
  char* request() const { return memory.data() + kPageBytes; }
  char* reply() const { return request() + request_bytes; }
  const uint32_t index;
  const size_t request_bytes, reply_bytes;
  OwnedFd file;
  SharedMapping memory;
  bool is_free = false;
  Clock::time_point freed_at;
};

class Ring : public RingConnection, public std::enable_shared_from_this<Ring> {
 public:
  Ring(OwnedFd socket, SharedMapping requested, SharedMapping sleep, const RingLimits& limits)
      : limits_(limits), socket_(std::move(socket)), requested_(std::move(requested)), sleep_(std::move(sleep)) {}

  std::unique_ptr<Call> begin(size_t request_bytes, size_t max_reply_bytes, bool may_wait) override;
  bool is_lost() const override { return is_lost_ || generation_ != fork_generation(); }
  size_t num_mailboxes() const override;
  bool has_refused() const override { return has_refused_; }
  void close() override;

  void require_there() const {
    if (is_lost()) throw Lost("the connection to the shard is lost");
  }
  void look_for_peer();
  void request(const Mailbox& mailbox);
  void give_back(Mailbox& mailbox);
  void retire(Mailbox& mailbox) noexcept;
  Spinning& spinning() { return spinning_; }

 private:
  std::shared_ptr<Mailbox> take_free(size_t request_bytes, size_t reply_bytes);
  uint32_t make_room(size_t bytes);
  std::shared_ptr<Mailbox> add(size_t request_bytes, size_t reply_bytes, double seconds);
  std::optional<Notice> answered(const Notice& sent, Clock::time_point deadline);
  void drop(uint32_t index) noexcept;
  void notify(const Notice& notice);

  const RingLimits limits_;
  const uint64_t generation_ = fork_generation();
  OwnedFd socket_;
  SharedMapping requested_, sleep_;
  std::atomic<bool> is_lost_ = false, has_refused_ = false;
  Spinning spinning_{limits_.spin_seconds};
  mutable std::mutex mutex_;  // guards what follows
  std::array<std::shared_ptr<Mailbox>, kMaxMailboxes> mailboxes_;
  uint64_t reserved_ = 0;  // a bit for each mailbox being created
  size_t reserved_bytes_ = 0;
  std::timed_mutex adding_;  // held by the thread that waits for the shard's answers
  uint64_t num_added_ = 0;
};

class RingCall : public Connection::Call {
 public:
  RingCall(std::shared_ptr<Ring> ring, std::shared_ptr<Mailbox> mailbox, size_t request_bytes)
      : ring_(std::move(ring)), mailbox_(std::move(mailbox)), request_bytes_(request_bytes) {}
  ~RingCall() override {
    if (ring_->is_lost()) return;
    if (!is_sent_ || has_reply_)
      ring_->give_back(*mailbox_);
    else
      ring_->retire(*mailbox_);
  }
  char* request() override { return mailbox_->request(); }
  void send(SteadyTime, const std::function<bool()>&) override;
  bool wait(SteadyTime deadline, const std::function<bool()>& look, bool may_spin) override;
  std::span<const char> reply() override { return {mailbox_->reply(), reply_bytes_}; }

 private:
  bool take_reply();

  const std::shared_ptr<Ring> ring_;
  const std::shared_ptr<Mailbox> mailbox_;
  const size_t request_bytes_;
  size_t reply_bytes_ = 0;
  bool is_sent_ = false, has_reply_ = false;
};

void RingCall::send(SteadyTime, const std::function<bool()>&) {
  ring_->require_there();
  MailboxControl& control = *mailbox_->control();
  control.request_bytes.store(request_bytes_, std::memory_order_relaxed);
  control.state.store(MailboxState::request, std::memory_order_release);
  is_sent_ = true;
  ring_->request(*mailbox_);
}

bool RingCall::take_reply() {
  if (mailbox_->control()->state.load(std::memory_order_acquire) != MailboxState::reply) return false;
  reply_bytes_ =
      std::min<size_t>(mailbox_->control()->reply_bytes.load(std::memory_order_relaxed), mailbox_->reply_bytes);
  has_reply_ = true;
  return true;
}

bool RingCall::wait(SteadyTime deadline, const std::function<bool()>& look, bool may_spin) {
  ring_->require_there();
  if (has_reply_ || take_reply() || (may_spin && ring_->spinning().look([this] { return take_reply(); }))) return true;
  MailboxControl& control = *mailbox_->control();
  auto looked_at = Clock::now(), next_look = looked_at + kLookInterval;
  for (;;) {
    ring_->require_there();
    const auto now = Clock::now();
    control.is_awaited.store(1, std::memory_order_seq_cst);
    const MailboxState state = control.state.load(std::memory_order_seq_cst);
    if (state != MailboxState::reply && now < deadline)
      futex_wait(control.state, state,
                 std::chrono::duration_cast<std::chrono::nanoseconds>(std::min(kLongestSleep, deadline - now)).count());
    control.is_awaited.store(0, std::memory_order_relaxed);
    if (take_reply()) return true;
    if (now >= deadline) return false;
    const auto woken = Clock::now();
    if (woken < looked_at + kLongestSleep / 2) continue;  // woken early: the shard began, or a signal came
    looked_at = woken;
    ring_->look_for_peer();
    if (look && Clock::now() >= next_look) {
      if (look()) return false;
      next_look = Clock::now() + kLookInterval;
    }
  }
}

size_t Ring::num_mailboxes() const {
  if (is_lost()) return 0;
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::count_if(mailboxes_.begin(), mailboxes_.end(), [](const auto& one) { return one != nullptr; }));
}

void Ring::close() {
  if (generation_ != fork_generation() || is_lost_.exchange(true)) return;
  shutdown(socket_.get(), SHUT_RDWR);
  const std::lock_guard lock(mutex_);
  for (auto& mailbox : mailboxes_) {
    if (mailbox) futex_wake(mailbox->control()->state);
    mailbox.reset();
  }
}

// Throws Lost if the shard has ended.
void Ring::look_for_peer() {
  pollfd one{socket_.get(), POLLRDHUP, 0};  // the end alone: late answers may precede it
  if (poll(&one, 1, 0) <= 0) return;
  close();
  require_there();
}

// Tells the shard that a mailbox holds a request.
void Ring::request(const Mailbox& mailbox) {
  reinterpret_cast<RequestedPage*>(requested_.data())
      ->requested.fetch_or(uint64_t{1} << mailbox.index, std::memory_order_seq_cst);
  if (reinterpret_cast<const SleepPage*>(sleep_.data())->is_asleep.load(std::memory_order_seq_cst) != 0) notify({});
}

// A packet that does not fit is one of many that wake the shard, or the shard has gone.
void Ring::notify(const Notice& notice) {
  try {
    send_packet(socket_.get(), &notice, sizeof(notice));
  } catch (const std::system_error&) {
    close();
    require_there();
  }
}

std::unique_ptr<Connection::Call> Ring::begin(size_t request_bytes, size_t max_reply_bytes, bool may_wait) {
  require_there();
  std::shared_ptr<Mailbox> mailbox = take_free(request_bytes, max_reply_bytes);
  if (!mailbox)
    mailbox = add(request_bytes, max_reply_bytes,
                  may_wait ? limits_.answer_seconds : std::min(limits_.answer_seconds, kMomentSeconds));
  return std::make_unique<RingCall>(shared_from_this(), std::move(mailbox), request_bytes);
}

// Returns the smallest free mailbox that both fit in; of equal ones the one freed last, as it is in the caches, and the
// others can become idle.
std::shared_ptr<Mailbox> Ring::take_free(size_t request_bytes, size_t reply_bytes) {
  const std::lock_guard lock(mutex_);
  const auto oldest = Clock::now() - duration_of(limits_.idle_seconds);
  std::shared_ptr<Mailbox> best;
  for (auto& one : mailboxes_) {
    if (!one || !one->is_free) continue;
    if (one->freed_at <= oldest) {
      drop(one->index);
      continue;
    }
    if (one->request_bytes < request_bytes || one->reply_bytes < reply_bytes) continue;
    if (!best || one->bytes() < best->bytes() || (one->bytes() == best->bytes() && one->freed_at > best->freed_at))
      best = one;
  }
  if (best) best->is_free = false;
  return best;
}

// Drops free mailboxes, which are all too small, for one of `bytes`, and reserves its number. Throws Full. Called with
// the mutex.
uint32_t Ring::make_room(size_t bytes) {
  for (;;) {
    size_t used = reserved_bytes_, count = static_cast<size_t>(std::popcount(reserved_));
    uint64_t taken = reserved_;
    Mailbox* largest = nullptr;
    for (const auto& one : mailboxes_) {
      if (!one) continue;
      used += one->bytes();
      ++count;
      taken |= uint64_t{1} << one->index;
      if (one->is_free && (largest == nullptr || one->bytes() > largest->bytes())) largest = one.get();
    }
    if (used + bytes <= std::max(limits_.max_pool_bytes, bytes) &&
        count < std::min(limits_.max_mailboxes, kMaxMailboxes)) {
      const auto index = static_cast<uint32_t>(std::countr_one(taken));
      reserved_ |= uint64_t{1} << index;
      reserved_bytes_ += bytes;
      return index;
    }
    if (largest == nullptr) throw Full("all memory shared with the shard is in use");
    drop(largest->index);
  }
}

// Returns a new mailbox that the shard has accepted in this time. Throws Full, Refused or Lost.
std::shared_ptr<Mailbox> Ring::add(size_t request_bytes, size_t reply_bytes, double seconds) {
  require_call_fits(request_bytes, reply_bytes);
  request_bytes = roomy(request_bytes);
  reply_bytes = roomy(reply_bytes);
  const size_t bytes = kPageBytes + request_bytes + reply_bytes;
  uint32_t index;
  {
    const std::lock_guard lock(mutex_);
    index = make_room(bytes);
  }
  std::shared_ptr<Mailbox> made;
  bool is_refused = false;
  try {
    const auto deadline = Clock::now() + duration_of(seconds);
    const std::unique_lock adding(adding_, deadline);
    if (adding) {
      made = std::make_shared<Mailbox>(index, request_bytes, reply_bytes);
      const Notice notice{NoticeKind::added, index, request_bytes, reply_bytes, ++num_added_};
      const bool is_sent = send_packet(socket_.get(), &notice, sizeof(notice), made->file.get());
      const std::optional<Notice> answer = is_sent ? answered(notice, deadline) : std::nullopt;
      is_refused = answer && answer->kind != NoticeKind::added;
      if (!answer || is_refused) made.reset();
    }
  } catch (const std::system_error&) {
    made.reset();
    is_refused = true;
  } catch (const Lost&) {
    made.reset();
  }
  const std::lock_guard lock(mutex_);
  reserved_ &= ~(uint64_t{1} << index);
  reserved_bytes_ -= bytes;
  require_there();
  if (is_refused) has_refused_ = true;
  if (is_refused) throw Refused("the shard or the system refuses more shared memory");
  if (!made) throw Full("the shard did not accept more shared memory in time", true);
  made->file.close();
  mailboxes_[index] = made;
  return made;
}

// Waits for the shard's answer to a notice; none: it did not come in time. Throws Lost.
std::optional<Notice> Ring::answered(const Notice& sent, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd one{socket_.get(), POLLIN, 0};
    if (left <= 0 || poll(&one, 1, static_cast<int>(left)) == 0) break;
    Notice answer;
    const Packet packet = receive_packet(socket_.get(), &answer, sizeof(answer));
    if (packet.bytes < 0) continue;
    if (packet.bytes != sizeof(answer)) {
      close();
      require_there();
    }
    if (answer.mailbox == sent.mailbox && answer.number == sent.number) return answer;
  }
  notify({NoticeKind::closed, sent.mailbox});  // in case the shard accepts it later
  return std::nullopt;
}

void Ring::give_back(Mailbox& mailbox) {
  mailbox.control()->state.store(MailboxState::free, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  if (mailbox.bytes() > limits_.max_pool_bytes) return drop(mailbox.index);
  mailbox.is_free = true;
  mailbox.freed_at = Clock::now();
}

// Retires a mailbox that the shard may still use: it is not used again.
void Ring::retire(Mailbox& mailbox) noexcept {
  const std::lock_guard lock(mutex_);
  drop(mailbox.index);
}

// Called with the mutex.
void Ring::drop(uint32_t index) noexcept {
  mailboxes_[index].reset();
  bool is_told = false;
  try {
    const Notice notice{NoticeKind::closed, index};
    is_told = send_packet(socket_.get(), &notice, sizeof(notice));
  } catch (const std::system_error&) {
  }
  if (is_told) return;
  is_lost_ = true;  // otherwise a later mailbox of this number would be refused
  shutdown(socket_.get(), SHUT_RDWR);
}

// Maps the page that the shard lets everybody read.
SharedMapping map_sleep_page(const OwnedFd& file) {
  const int seals = fcntl(file.get(), F_GET_SEALS);
  struct stat status;
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(file.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(kPageBytes))
    throw std::runtime_error("the process that listens there is not a shard");
  return SharedMapping(file.get(), kPageBytes, false);
}

}  // namespace

std::shared_ptr<RingConnection> connect_ring(const std::string& name, const std::string& secret, double timeout_seconds,
                                             const RingLimits& limits) {
  const auto fail = [](const char* what) { throw std::system_error(errno, std::generic_category(), what); };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.sun_path) || secret.size() != kSecretBytes)
    throw std::runtime_error("the shard's offer of a connection has no socket, or no secret of 32 bytes");
  name.copy(address.sun_path + 1, name.size());
  OwnedFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) fail("socket");
  const auto micros = static_cast<int64_t>(std::clamp(timeout_seconds, 1e-3, 1e6) * 1e6);
  const timeval limit{static_cast<time_t>(micros / 1'000'000), static_cast<suseconds_t>(micros % 1'000'000)};
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // limits connect(), too
  const auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), address_bytes) != 0)
    fail("no shard listens on this machine");
  // and does not get the secret
  if (!is_same_user(socket.get())) throw std::runtime_error("another user listens there");
  OwnedFd page = make_shared_file(kPageBytes);
  SharedMapping requested(page.get(), kPageBytes, true);
  Hello hello = hello_with(secret);
  if (!send_packet(socket.get(), hello.data(), hello.size(), page.get()))
    throw std::runtime_error("the shard does not receive the hello");
  pollfd one{socket.get(), POLLIN, 0};
  if (poll(&one, 1, static_cast<int>(micros / 1000)) != 1) throw std::runtime_error("the shard does not answer");
  const Packet packet = receive_packet(socket.get(), hello.data(), hello.size());
  if (packet.bytes != sizeof(FrameHeader) || !packet.fd) throw std::runtime_error("the shard refuses the connection");
  require_greeting(hello.data());
  return std::make_shared<Ring>(std::move(socket), std::move(requested), map_sleep_page(packet.fd), limits);
}

}  // namespace geartrain
