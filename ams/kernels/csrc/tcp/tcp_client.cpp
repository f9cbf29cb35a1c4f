#include "tcp/tcp_client.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "carriers/hello.hpp"
#include "frames/frame.hpp"
#include "tcp/buffers.hpp"
#include "tcp/byte_stream.hpp"

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Clock::duration kLookInterval = std::chrono::milliseconds(100);
constexpr size_t kMinAttached = size_t{64} << 10;  // less is copied: that is faster than a system call
constexpr Clock::duration kLongestSilence = std::chrono::seconds(30);  // of a shard that receives no bytes of a request

int64_t millis_until(Clock::time_point time) {
  return std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(time - Clock::now()).count());
}

// Call that waits for its reply. Shared with the reading thread.
struct Pending {
  uint64_t number = 0;
  size_t max_reply_bytes = 0, reply_bytes = 0;
  Buffer reply;
  bool is_done = false;
};

// Has no thread that reads: one of the callers that wait for replies reads for all of them.
class Tcp : public Connection, public std::enable_shared_from_this<Tcp> {
 public:
  Tcp(ByteStream stream, const TcpLimits& limits) : limits_(limits), stream_(std::move(stream)) {}

  std::unique_ptr<Call> begin(size_t request_bytes, size_t max_reply_bytes, bool may_wait) override;
  bool is_lost() const override { return is_lost_ || generation_ != fork_generation(); }
  void close() override;

  void send(const std::shared_ptr<Pending>& pending, std::span<const std::span<const char>> frame, SteadyTime deadline,
            const std::function<bool()>& look);
  bool wait(const std::shared_ptr<Pending>& pending, SteadyTime deadline, const std::function<bool()>& look);
  void forget(const std::shared_ptr<Pending>& pending, size_t bytes);
  BufferPool& buffers() { return buffers_; }

 private:
  void require_there() const {
    if (is_lost()) throw Lost("the connection to the shard is lost");
  }
  void read_for_all(int millis);
  void read(int millis);
  void read_header();
  void write(std::span<const char> bytes, SteadyTime deadline, const std::function<bool()>& look);

  const TcpLimits limits_;
  const uint64_t generation_ = fork_generation();
  ByteStream stream_;
  std::atomic<bool> is_lost_ = false;
  BufferPool buffers_;
  std::timed_mutex sending_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::unordered_map<uint64_t, std::shared_ptr<Pending>> pending_;
  size_t in_flight_bytes_ = 0;
  bool is_read_ = false;
  // Used by the reading thread.
  std::array<char, sizeof(FrameHeader)> header_;
  size_t header_bytes_ = 0, body_bytes_ = 0, body_left_ = 0;
  std::shared_ptr<Pending> reading_;  // null: the call of this frame was abandoned
};

class TcpCall : public Connection::Call {
 public:
  TcpCall(std::shared_ptr<Tcp> tcp, size_t request_bytes, size_t max_reply_bytes)
      : tcp_(std::move(tcp)), request_(tcp_->buffers().take(request_bytes)), request_bytes_(request_bytes) {
    pending_->max_reply_bytes = max_reply_bytes;
  }
  ~TcpCall() override {
    if (tcp_->is_lost()) return;
    tcp_->forget(pending_, request_bytes_ + pending_->max_reply_bytes);
    tcp_->buffers().give_back(std::move(request_));
    if (pending_->is_done) tcp_->buffers().give_back(std::move(pending_->reply));
  }
  char* request() override { return request_.data(); }
  void attach(size_t offset, const char* from, size_t bytes) override {
    if (bytes < kMinAttached) return Call::attach(offset, from, bytes);
    pieces_.push_back({request_.data() + begun_, offset - begun_});
    pieces_.push_back({from, bytes});
    begun_ = offset + bytes;
  }
  void send(SteadyTime deadline, const std::function<bool()>& look) override {
    pieces_.push_back({request_.data() + begun_, request_bytes_ - begun_});
    tcp_->send(pending_, pieces_, deadline, look);
  }
  bool wait(SteadyTime deadline, const std::function<bool()>& look, bool) override {
    return tcp_->wait(pending_, deadline, look);
  }
  std::span<const char> reply() override { return {pending_->reply.data(), pending_->reply_bytes}; }

 private:
  const std::shared_ptr<Tcp> tcp_;
  Buffer request_;
  const size_t request_bytes_;
  std::vector<std::span<const char>> pieces_;  // of the frame, up to the start of the last rows
  size_t begun_ = 0;
  const std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
};

std::unique_ptr<Connection::Call> Tcp::begin(size_t request_bytes, size_t max_reply_bytes, bool) {
  require_there();
  require_call_fits(request_bytes, max_reply_bytes, limits_.max_frame_bytes);
  {
    const std::lock_guard lock(mutex_);
    const size_t bytes = request_bytes + max_reply_bytes;
    if (in_flight_bytes_ + bytes > std::max(limits_.max_in_flight_bytes, bytes))
      throw Full("too many bytes are in flight to the shard");
    in_flight_bytes_ += request_bytes + max_reply_bytes;
  }
  try {
    return std::make_unique<TcpCall>(shared_from_this(), request_bytes, max_reply_bytes);
  } catch (...) {  // no memory
    const std::lock_guard lock(mutex_);
    in_flight_bytes_ -= request_bytes + max_reply_bytes;
    throw;
  }
}

void Tcp::forget(const std::shared_ptr<Pending>& pending, size_t bytes) {
  const std::lock_guard lock(mutex_);
  in_flight_bytes_ -= bytes;
  const auto found = pending_.find(pending->number);
  if (found != pending_.end() && found->second == pending) pending_.erase(found);
}

void Tcp::close() {
  if (generation_ != fork_generation() || is_lost_.exchange(true)) return;
  stream_.end();
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Tcp::send(const std::shared_ptr<Pending>& pending, std::span<const std::span<const char>> frame,
               SteadyTime deadline, const std::function<bool()>& look) {
  require_there();
  std::memcpy(&pending->number, frame.front().data() + offsetof(FrameHeader, number), sizeof(pending->number));
  {
    const std::lock_guard lock(mutex_);
    if (!pending_.emplace(pending->number, pending).second)
      throw std::logic_error("a call of this number is under way");
  }
  std::unique_lock lock(sending_, std::defer_lock);
  while (!lock.try_lock_until(std::min(deadline, Clock::now() + kLookInterval)))
    if (Clock::now() >= deadline || (look && look())) throw Full("the shard did not receive the request in time");
  require_there();
  try {
    for (const auto& piece : frame) write(piece, deadline, look);
  } catch (const std::runtime_error&) {  // the part of the frame that was sent cannot be taken back
    close();
    require_there();
  } catch (...) {  // thrown by the look
    close();
    throw;
  }
}

// While the shard receives nothing, replies are read: it may be sending, and waiting for that.
void Tcp::write(std::span<const char> bytes, SteadyTime deadline, const std::function<bool()>& look) {
  auto silent_since = Clock::now(), next_look = silent_since + kLookInterval;
  for (size_t done = 0; done < bytes.size();) {
    const size_t written = stream_.write(bytes.data() + done, bytes.size() - done);
    done += written;
    if (written != 0) {
      silent_since = Clock::now();
      continue;
    }
    require_there();
    if (const auto now = Clock::now(); now >= deadline || now - silent_since > kLongestSilence)
      throw std::runtime_error("the shard receives nothing");
    if (look && Clock::now() >= next_look) {
      if (look()) throw std::runtime_error("the caller stopped waiting");
      next_look = Clock::now() + kLookInterval;
    }
    if (!stream_.wait(true, static_cast<int>(std::min<int64_t>(100, millis_until(deadline) + 1)))) continue;
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(is_read_, true)) continue;
    }
    read_for_all(0);
  }
}

// Called by the thread that has set is_read_. Unreadable input ends the connection.
void Tcp::read_for_all(int millis) {
  try {
    read(millis);
  } catch (const std::exception&) {
    close();
  }
  const std::lock_guard lock(mutex_);
  is_read_ = false;
  changed_.notify_all();
}

bool Tcp::wait(const std::shared_ptr<Pending>& pending, SteadyTime deadline, const std::function<bool()>& look) {
  auto next_look = Clock::now() + kLookInterval;
  for (;;) {
    bool is_reader;
    {
      std::unique_lock lock(mutex_);
      if (pending->is_done) return true;
      require_there();
      const bool is_late = Clock::now() >= deadline;
      if (is_late && !stream_.wait(false, 0)) return false;  // input that has arrived is read, even after the deadline
      is_reader = !std::exchange(is_read_, true);
      if (!is_reader) changed_.wait_until(lock, is_late ? next_look : std::min(deadline, next_look));
    }
    if (is_reader) read_for_all(static_cast<int>(millis_until(std::min(deadline, next_look))) + 1);
    if (Clock::now() >= next_look) {
      if (look && look()) return false;
      next_look = Clock::now() + kLookInterval;
    }
  }
}

// Called by the reading thread: reads input up to the end of a frame, and waits up to `millis` for its start. Throws.
void Tcp::read(int millis) {
  std::array<char, size_t{64} << 10> dropped;
  bool has_waited = false;
  for (;;) {
    size_t received;
    if (header_bytes_ < header_.size()) {
      received = stream_.read(header_.data() + header_bytes_, header_.size() - header_bytes_);
      header_bytes_ += received;
      if (header_bytes_ == header_.size()) read_header();
    } else if (reading_) {
      received = stream_.read(reading_->reply.data() + header_.size() + body_bytes_ - body_left_, body_left_);
      body_left_ -= received;
    } else {
      received = stream_.read(dropped.data(), std::min(dropped.size(), body_left_));
      body_left_ -= received;
    }
    if (header_bytes_ == header_.size() && body_left_ == 0) {
      header_bytes_ = 0;
      if (const auto done = std::move(reading_)) {
        const std::lock_guard lock(mutex_);
        done->is_done = true;
        pending_.erase(done->number);
      }
      reading_.reset();
      return;
    }
    if (received != 0) continue;
    if (std::exchange(has_waited, true) || !stream_.wait(false, millis)) return;
  }
}

void Tcp::read_header() {
  const FrameHeader header = parse_header(header_.data(), FrameKind::reply);
  body_bytes_ = body_left_ = header.body_bytes;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(header.number);
    if (found != pending_.end()) reading_ = found->second;
  }
  if (!reading_) {
    if (header.body_bytes > limits_.max_frame_bytes)
      throw std::runtime_error("the shard sends a frame larger than any reply");
    return;
  }
  const size_t bytes = header_.size() + header.body_bytes;
  if (bytes > reading_->max_reply_bytes) throw std::runtime_error("the shard sends more than was requested");
  reading_->reply = buffers_.take(bytes);
  reading_->reply_bytes = bytes;
  std::memcpy(reading_->reply.data(), header_.data(), header_.size());
}

}  // namespace

std::shared_ptr<Connection> connect_tcp(const std::string& host, uint16_t port, const std::string& secret,
                                        double timeout_seconds, bool uses_tls, const TcpLimits& limits) {
  if (port == 0 || secret.size() != kSecretBytes)
    throw std::runtime_error("the shard's offer of a connection has no port, or no secret of 32 bytes");
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  OwnedFd socket = connect_stream(host.c_str(), port, timeout_seconds);
  const int fd = socket.get();
  ByteStream stream(std::move(socket), uses_tls ? Tls::client(fd, secret, limits.max_records) : nullptr);
  const auto await = [&] {
    if (Clock::now() >= deadline || !stream.wait(false, static_cast<int>(millis_until(deadline))))
      throw std::runtime_error("the shard does not answer");
  };
  while (!stream.shake_hands()) await();
  Hello hello = hello_with(secret);
  if (stream.write(hello.data(), hello.size()) != hello.size()) throw std::runtime_error("the shard receives nothing");
  for (size_t got = 0; got < sizeof(FrameHeader);) {
    const size_t received = stream.read(hello.data() + got, sizeof(FrameHeader) - got);
    got += received;
    if (received == 0) await();
  }
  require_greeting(hello.data());
  return std::make_shared<Tcp>(std::move(stream), limits);
}

}  // namespace geartrain
