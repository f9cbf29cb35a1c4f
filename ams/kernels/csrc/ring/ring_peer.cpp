#include "ring/ring_peer.hpp"

#include <bit>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace geartrain {
namespace {

constexpr int kMaxPackets = 16;  // of one turn: other clients wait while mailboxes are mapped

}  // namespace

RingPeer::Mailbox::Mailbox(SharedMapping shared, const Notice& notice, std::shared_ptr<MailboxCount> counted)
    : memory(std::move(shared)),
      request(memory.data() + kPageBytes),
      reply(request + notice.request_bytes),
      request_bytes(notice.request_bytes),
      reply_bytes(notice.reply_bytes),
      count(std::move(counted)) {
  ++count->now;
}

void RingPeer::Mailbox::answer(size_t bytes) const {
  control()->reply_bytes.store(bytes, std::memory_order_relaxed);
  control()->state.store(MailboxState::reply, std::memory_order_seq_cst);
  if (control()->is_awaited.load(std::memory_order_seq_cst) != 0) futex_wake(control()->state);
}

// The reply's place in a mailbox.
class RingPeer::MailboxReply : public ReplyPlace {
 public:
  explicit MailboxReply(std::shared_ptr<Mailbox> mailbox) : mailbox_(std::move(mailbox)) {}
  std::span<char> room(size_t min_bytes, size_t) override {
    if (min_bytes > mailbox_->reply_bytes)
      throw Fault("ProtocolError", "the reply takes " + std::to_string(min_bytes) +
                                       " bytes; the client left room for " + std::to_string(mailbox_->reply_bytes));
    return {mailbox_->reply, mailbox_->reply_bytes};
  }
  void answer(size_t bytes) noexcept override { mailbox_->answer(bytes); }
  Carrier carrier() const override { return Carrier::ring; }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
};

RingPeer::RingPeer(std::shared_ptr<Handler> handler, OwnedFd socket, const OwnedFd& page,
                   std::shared_ptr<MailboxCount> count)
    : handler_(std::move(handler)),
      socket_(std::move(socket)),
      page_(map_their_file(page.get(), kPageBytes)),
      count_(std::move(count)) {}

bool RingPeer::receive() {
  for (int i = 0; i < kMaxPackets; ++i) {
    Notice notice;
    const Packet packet = receive_packet(socket_.get(), &notice, sizeof(notice));
    if (packet.bytes < 0) return true;
    if (packet.bytes != sizeof(notice)) return false;
    switch (notice.kind) {
      case NoticeKind::wake: break;
      case NoticeKind::added: add(notice, packet.fd); break;
      case NoticeKind::closed:
        if (notice.mailbox >= kMaxMailboxes) return false;
        mailboxes_[notice.mailbox].reset();
        break;
      default: return false;
    }
  }
  return true;
}

void RingPeer::add(Notice notice, const OwnedFd& fd) {
  try {
    size_t bytes = kPageBytes;
    for (const size_t part : {notice.request_bytes, notice.reply_bytes}) {
      if (part == 0 || part % kPageBytes != 0 || part > kMaxMailboxBytes)
        throw std::runtime_error("a part is empty, too large or not of whole pages");
      bytes += part;
    }
    if (notice.mailbox >= kMaxMailboxes || mailboxes_[notice.mailbox] || bytes > kMaxMailboxBytes ||
        count_->now >= count_->most)
      throw std::runtime_error("there are too many mailboxes, or this one is too large");
    mailboxes_[notice.mailbox] = std::make_shared<Mailbox>(map_their_file(fd.get(), bytes), notice, count_);
  } catch (const std::exception&) {
    notice.kind = NoticeKind::refused;
  }
  try {
    send_packet(socket_.get(), &notice, sizeof(notice));
  } catch (const std::system_error&) {  // it has gone: the next read of the socket reports it
  }
}

bool RingPeer::serve(const Waits& waits, const ServingTurn& serving) {
  const bool was_held = held_ != nullptr;
  std::shared_ptr<ServedCall> call = was_held ? std::move(held_) : next_call();
  if (!call) return !has_gone_;
  if (serving.is_between() && !call->is_brief_reading()) {
    held_ = std::move(call);
    return true;
  }
  is_at_work_ = true;
  const bool is_waiting = call->perform({serving.others, serving.has_turn, was_held});
  is_at_work_ = false;
  if (is_waiting) waits(std::move(call));
  return !has_gone_;
}

// Returns the call in the next mailbox in turn; null: there is none that is still wanted and can be read.
std::shared_ptr<ServedCall> RingPeer::next_call() {
  if (page()->requested.load(std::memory_order_relaxed) != 0)
    pending_ |= page()->requested.exchange(0, std::memory_order_acq_rel);
  if (pending_ == 0) return nullptr;
  const size_t first = static_cast<size_t>(std::countr_zero(std::rotr(pending_, static_cast<int>(next_))));
  const size_t index = (next_ + first) % kMaxMailboxes;
  next_ = (index + 1) % kMaxMailboxes;
  pending_ &= ~(uint64_t{1} << index);
  const std::shared_ptr<Mailbox> mailbox = mailboxes_[index];
  if (!mailbox) return nullptr;  // closed: its caller has gone
  MailboxState expected = MailboxState::request;
  if (!mailbox->control()->state.compare_exchange_strong(expected, MailboxState::busy, std::memory_order_acq_rel))
    return nullptr;
  const size_t bytes = mailbox->control()->request_bytes.load(std::memory_order_relaxed);
  std::shared_ptr<ServedCall> call;
  try {
    if (bytes < sizeof(FrameHeader) || bytes > mailbox->request_bytes)
      throw std::runtime_error("a frame cannot have this size");
    call = std::make_shared<ServedCall>(handler_, parse_header(mailbox->request, FrameKind::request),
                                        std::make_unique<MailboxReply>(mailbox), [this, index, mailbox] {
                                          has_gone_ = has_gone_ || !receive();
                                          return has_gone_ || mailboxes_[index] != mailbox;
                                        });
  } catch (const std::exception&) {  // damaged header, or no memory
    has_gone_ = true;
    return nullptr;
  }
  return call->read(mailbox->request, bytes) ? call : nullptr;
}

}  // namespace geartrain
