#include "tcp/tcp_peer.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

namespace geartrain {
namespace {

constexpr size_t kMaxTurnBytes = size_t{1} << 20;  // read or sent in one turn, while other clients wait

// Reply in its own memory, which goes to the client's outbox.
class OwnReply : public ReplyPlace {
 public:
  explicit OwnReply(std::shared_ptr<Outbox> outbox) : outbox_(std::move(outbox)) {}
  ~OwnReply() override {
    for (Reply& one : reply_) outbox_->memory().give_back(std::move(one.buffer));
    if (!is_answered_) outbox_->lose();
  }
  std::span<char> room(size_t, size_t most_bytes) override {
    if (most_bytes > outbox_->memory().max_frame)
      throw Fault("MessageTooLarge", "the reply takes up to " + std::to_string(most_bytes) +
                                         " bytes; a frame has at most " + std::to_string(outbox_->memory().max_frame) +
                                         "; pull fewer rows at once");
    Reply& reply = reply_.emplace_back();
    try {
      reply.buffer = outbox_->memory().take(most_bytes);
    } catch (...) {
      reply_.pop_back();
      throw;
    }
    return {reply_.back().buffer.data(), reply_.back().buffer.bytes()};
  }
  void answer(size_t bytes) noexcept override {
    reply_.back().bytes = bytes;
    is_answered_ = true;
    outbox_->add(reply_);
  }
  Carrier carrier() const override { return Carrier::tcp; }

 private:
  const std::shared_ptr<Outbox> outbox_;
  std::list<Reply> reply_;  // one, once there is room
  bool is_answered_ = false;
};

// waits for no large ones, and is performed even if its caller has gone
constexpr size_t kSmallRequest = size_t{64} << 10;
// Share of the caller's time limit, and longest time, after which it is told that the shard is busy.
constexpr double kPatienceShare = 0.5, kMaxPatienceSeconds = 10;

thread_local const Outbox* about_to_be_flushed = nullptr;

}  // namespace

Buffer FrameMemory::take(size_t bytes) {
  Buffer buffer = pool.take(bytes);
  if (used.fetch_add(buffer.bytes()) + buffer.bytes() > most) {
    give_back(std::move(buffer));
    throw Fault("Busy", "this shard has too many requests and replies in flight; retry", 0.1);
  }
  return buffer;
}

void FrameMemory::give_back(Buffer buffer) {
  used -= buffer.bytes();
  pool.give_back(std::move(buffer));
}

Outbox::~Outbox() {
  for (Reply& one : replies_) memory_->give_back(std::move(one.buffer));
}

void Outbox::add(std::list<Reply>& reply) noexcept {
  {
    const std::lock_guard lock(mutex_);
    num_bytes_ += reply.back().bytes;
    replies_.splice(replies_.end(), reply, std::prev(reply.end()));
  }
  wake();
}

void Outbox::lose() noexcept {
  {
    const std::lock_guard lock(mutex_);
    has_lost_ = true;
  }
  wake();
}

void Outbox::wake() noexcept {
  if (about_to_be_flushed != this) eventfd_write(wake_->get(), 1);
}

size_t Outbox::num_bytes() {
  const std::lock_guard lock(mutex_);
  return num_bytes_;
}

bool Outbox::is_due() {
  const std::lock_guard lock(mutex_);
  return num_bytes_ != 0 || has_lost_;
}

void Outbox::flush(ByteStream& stream) {
  const std::lock_guard lock(mutex_);
  if (has_lost_) throw std::runtime_error("a reply is lost");
  for (size_t turn = 0; !replies_.empty() && turn < kMaxTurnBytes;) {
    Reply& first = replies_.front();
    while (first.sent < first.bytes) {
      if (turn >= kMaxTurnBytes) return;
      const size_t sent =
          stream.write(first.buffer.data() + first.sent, std::min(first.bytes - first.sent, kMaxTurnBytes));
      if (sent == 0) return;
      turn += sent;
      first.sent += sent;
      num_bytes_ -= sent;
    }
    memory_->give_back(std::move(first.buffer));
    replies_.pop_front();
  }
}

TcpPeer::~TcpPeer() {
  end_wait();
  give_back_frame();
}

void TcpPeer::give_back_frame() {
  FrameMemory& memory = outbox_->memory();
  // Used by the server's thread alone; a peer that was never served may end on another.
  if (counted_ != 0) memory.received -= std::exchange(counted_, 0);
  memory.give_back(std::move(frame_));
}

bool TcpPeer::flush() {
  try {
    const size_t before = outbox_->num_bytes();
    outbox_->flush(stream_);
    const size_t after = outbox_->num_bytes();
    if (after < before) window_moved_ += before - after;
    if (after != before || before == 0) moved_at_ = Clock::now();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool TcpPeer::receive(const Waits& waits, const ServingTurn& serving) {
  std::array<char, size_t{64} << 10> dropped;
  try {
    if (held_) {
      if (!serving.is_between()) perform(waits, serving);
      return true;
    }
    if (waits_for_memory()) return !stream_.has_ended();
    const size_t most = serving.is_between() ? kMaxReadBetween : kMaxTurnBytes;
    for (size_t turn = 0; turn < most;) {
      size_t received;
      if (header_bytes_ < header_bytes_of_.size()) {
        received = stream_.read(header_bytes_of_.data() + header_bytes_, header_bytes_of_.size() - header_bytes_);
        header_bytes_ += received;
        if (header_bytes_ == header_bytes_of_.size()) begin_body();
        if (waits_for_memory()) return true;
      } else {
        const size_t left = std::min(header_.body_bytes - body_got_, kMaxTurnBytes);
        received = frame_.data() != nullptr ? stream_.read(frame_.data() + header_bytes_of_.size() + body_got_, left)
                                            : stream_.read(dropped.data(), std::min(left, dropped.size()));
        body_got_ += received;
      }
      if (received == 0) return true;
      turn += received;
      window_moved_ += received;
      moved_at_ = Clock::now();
      if (header_bytes_ == header_bytes_of_.size() && body_got_ == header_.body_bytes) {
        perform(waits, serving);
        return true;
      }
    }
    return true;
  } catch (const std::exception&) {  // it has gone, or sent a damaged header
    return false;
  }
}

bool TcpPeer::is_slow(bool of_requests, Clock::time_point now, Clock::duration patience) {
  const size_t claim = of_requests ? counted_ : counted_ + outbox_->num_bytes();
  if (claim == 0 || is_at_work_ || held_) {
    forgive();
    return false;
  }
  if (!window_began_) {
    window_began_ = now;
    window_moved_ = 0;
    return false;
  }
  const auto passed = now - *window_began_;
  if (passed < patience / 5) return false;
  const double share = std::chrono::duration<double>(passed) / std::chrono::duration<double>(patience);
  const bool is_slow = static_cast<double>(window_moved_) < static_cast<double>(claim) * share;
  forgive();
  // Unread input of a request is not its fault, unless its outbox is full.
  return is_slow && (counted_ == 0 || is_full() || !stream_.wait(false, 0));
}

void TcpPeer::begin_body() {
  header_ = parse_header(header_bytes_of_.data(), FrameKind::request);
  body_got_ = 0;
  const FrameMemory& memory = outbox_->memory();
  if (header_.body_bytes > memory.max_frame) throw std::runtime_error("the frame is too large");
  if (frame_bytes() <= kSmallRequest || (memory.num_waiting == 0 && has_room())) return take_memory();
  const double seconds = header_.seconds > 0 ? header_.seconds * kPatienceShare : kMaxPatienceSeconds;
  const std::chrono::duration<double> patience(std::min(seconds, kMaxPatienceSeconds));
  waits_until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(patience);
  ++outbox_->memory().num_waiting;
}

bool TcpPeer::has_room() const {
  const FrameMemory& memory = outbox_->memory();
  return memory.received == 0 || memory.received + frame_bytes() <= memory.max_received;
}

bool TcpPeer::let_in() {
  if (has_room()) take_memory();
  else if (Clock::now() >= waits_until())
    refusal_ = Fault("Busy", "this shard has too many large requests; retry", 0.1);
  else return false;
  end_wait();
  moved_at_ = Clock::now();
  return true;
}

void TcpPeer::end_wait() {
  if (std::exchange(waits_until_, std::nullopt)) --outbox_->memory().num_waiting;
}

// A request without memory for it is skipped, then refused.
void TcpPeer::take_memory() {
  FrameMemory& memory = outbox_->memory();
  try {
    frame_ = memory.take(frame_bytes());
  } catch (const Fault& fault) {
    refusal_ = fault;
    return;
  } catch (const std::bad_alloc&) {
    refusal_ =
        Fault("OutOfMemory", "the shard is out of memory; the call changed nothing. Give its machine more memory");
    return;
  }
  if (frame_bytes() > kSmallRequest) memory.received += counted_ = frame_bytes();
  std::memcpy(frame_.data(), header_bytes_of_.data(), header_bytes_of_.size());
}

void TcpPeer::perform(const Waits& waits, const ServingTurn& serving) {
  const size_t bytes = frame_bytes();
  const bool was_held = held_ != nullptr;
  header_bytes_ = 0;
  std::shared_ptr<ServedCall> call =
      was_held ? std::move(held_)
               : std::make_shared<ServedCall>(handler_, header_, std::make_unique<OwnReply>(outbox_),
                                              [this] { return stream_.has_ended(); });
  bool is_wanted = was_held;
  const Outbox* const outer = std::exchange(about_to_be_flushed, outbox_.get());
  if (!was_held) {
    if (frame_.data() == nullptr) call->refuse(refusal_);
    else is_wanted = call->read(frame_.data(), bytes);
  }
  if (is_wanted && serving.is_between() && !call->is_brief_reading()) {
    held_ = std::move(call);
  } else {
    is_at_work_ = true;
    const bool is_waiting =
        is_wanted && call->perform({serving.others, serving.has_turn, was_held || bytes > kSmallRequest});
    is_at_work_ = false;
    give_back_frame();
    if (is_waiting) waits(std::move(call));
  }
  about_to_be_flushed = outer;
}

}  // namespace geartrain
