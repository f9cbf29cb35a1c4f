// A shard's side of a client of another machine: a stream of frames.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "carriers/served_call.hpp"
#include "carriers/connection.hpp"
#include "tcp/buffers.hpp"
#include "tcp/byte_stream.hpp"

namespace geartrain {

// Memory for received frames and replies of all clients of a server.
struct FrameMemory {
  std::atomic<size_t> used = 0;
  size_t most = size_t{2} << 30;
  size_t max_frame = kMaxCallBytes;
  // For the server's thread: bytes of large requests that are being received or wait to begin, their limit unless there
  // is only one, and the number of clients that wait for it.
  size_t received = 0, max_received = size_t{128} << 20, num_waiting = 0;
  BufferPool pool;
  // Throws Fault("Busy") if there is no room, std::bad_alloc.
  Buffer take(size_t bytes);
  void give_back(Buffer buffer);
};

// A reply, or room for one: a list element, so that it moves between lists without allocation.
struct Reply {
  Buffer buffer;
  size_t bytes = 0, sent = 0;
};

// Replies to send. Any thread adds them; the server's thread sends.
class Outbox {
 public:
  Outbox(std::shared_ptr<FrameMemory> memory, std::shared_ptr<OwnedFd> wake)
      : memory_(std::move(memory)), wake_(std::move(wake)) {}
  ~Outbox();
  FrameMemory& memory() { return *memory_; }
  // Takes the one element of `reply`. Wakes the server's thread, unless that will flush this one: see TcpPeer::perform.
  void add(std::list<Reply>& reply) noexcept;
  // Records that an expected reply will not come: the connection must end, so that its caller learns of it.
  void lose() noexcept;
  // Sends as much as possible now, up to a bound. Throws as ByteStream::write, and std::runtime_error if a reply was
  // lost.
  void flush(ByteStream& stream);
  size_t num_bytes();
  // Whether flush has work.
  bool is_due();

 private:
  void wake() noexcept;

  const std::shared_ptr<FrameMemory> memory_;
  const std::shared_ptr<OwnedFd> wake_;
  std::mutex mutex_;
  std::list<Reply> replies_;
  size_t num_bytes_ = 0;
  bool has_lost_ = false;
};

// Used by the server's thread alone.
class TcpPeer {
 public:
  using Clock = std::chrono::steady_clock;
  using Waits = std::function<void(std::shared_ptr<ServedCall>)>;

  TcpPeer(std::shared_ptr<Handler> handler, ByteStream stream, std::shared_ptr<FrameMemory> memory,
          std::shared_ptr<OwnedFd> wake)
      : handler_(std::move(handler)),
        stream_(std::move(stream)),
        host_(stream_.host()),
        outbox_(std::make_shared<Outbox>(std::move(memory), std::move(wake))) {}
  ~TcpPeer();
  int fd() const { return stream_.fd(); }
  // Sends the answer to the hello. Returns whether it was accepted.
  bool greet(const char* answer, size_t bytes) { return stream_.write(answer, bytes) == bytes; }
  // Performs the request that it holds, or, unless it waits for memory, reads input and performs one complete frame.
  // Between two blocks of another's request it reads little, and holds a longer request: no more are read until that is
  // done. False: the client has gone, or violates the protocol.
  bool receive(const Waits& waits, const ServingTurn& serving);
  bool holds_request() const { return held_ != nullptr; }
  // Whether it must be served again though its socket may report nothing.
  bool is_ready() { return holds_request() || (stream_.has_buffered() && !waits_for_memory() && !is_full()); }
  // Whether its next request is so large that it waits for others to be done, and until when. It is not read meanwhile.
  bool waits_for_memory() const { return waits_until_.has_value(); }
  Clock::time_point waits_until() const { return *waits_until_; }
  // Ends that wait if there is room, or refuses the request after its time limit (Busy). Returns whether it has ended.
  bool let_in();
  // Whether a request of it is being performed, so that it must stay.
  bool is_at_work() const { return is_at_work_; }
  // Whether it has lost its rights.
  bool is_over() const { return handler_->is_over(); }
  // Sends replies. False: the client has gone.
  bool flush();
  bool has_replies() { return outbox_->is_due(); }
  // Whether it accepts too few replies for its requests to be read.
  bool is_full() { return outbox_->num_bytes() > kMaxOutbox; }
  // Its machine.
  const std::string& host() const { return host_; }
  // Bytes it uses of the room for large requests.
  size_t received() const { return counted_; }
  // Called repeatedly while others need memory: whether it holds some, for a request being received (`of_requests`) or
  // for replies, and moves so little that all of it would take longer than `patience`. Checks a fifth of that at a
  // time, from the first call on.
  bool is_slow(bool of_requests, Clock::time_point now, Clock::duration patience);
  void forgive() { window_began_.reset(); }
  // Whether it has neither sent the rest of a frame nor accepted its replies since then.
  bool is_silent_since(Clock::time_point time) {
    return (header_bytes_ != 0 || has_replies()) && !waits_for_memory() && moved_at_ < time;
  }

 private:
  static constexpr size_t kMaxOutbox = size_t{64} << 20, kMaxReadBetween = size_t{256} << 10;
  void begin_body();
  bool has_room() const;
  void take_memory();
  void end_wait();
  void give_back_frame();
  size_t frame_bytes() const { return header_bytes_of_.size() + header_.body_bytes; }
  void perform(const Waits& waits, const ServingTurn& serving);

  const std::shared_ptr<Handler> handler_;
  ByteStream stream_;
  const std::string host_;
  const std::shared_ptr<Outbox> outbox_;
  std::optional<Clock::time_point> window_began_;
  size_t window_moved_ = 0;  // bytes moved since then
  Clock::time_point moved_at_ = Clock::now();
  std::array<char, sizeof(FrameHeader)> header_bytes_of_;
  size_t header_bytes_ = 0;
  FrameHeader header_;
  size_t body_got_ = 0;
  Buffer frame_;  // none: there is no memory for it, and it is skipped
  size_t counted_ = 0;  // its bytes in FrameMemory::received
  std::optional<Clock::time_point> waits_until_;
  Fault refusal_{"Busy", ""};
  std::shared_ptr<ServedCall> held_;  // of frame_
  bool is_at_work_ = false;
};

}  // namespace geartrain
