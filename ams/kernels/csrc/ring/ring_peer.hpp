// A shard's side of a client on the same machine: its socket and its mailboxes.
#pragma once

#include <array>
#include <functional>
#include <memory>

#include "carriers/served_call.hpp"
#include "ring/mailbox.hpp"

namespace geartrain {

// Number and limit of the mailboxes of a server's clients. Used by the server's thread and the last user of a call.
struct MailboxCount {
  std::atomic<size_t> now = 0;
  size_t most = 1024;
};

// Used by the server's thread alone.
class RingPeer {
 public:
  using Waits = std::function<void(std::shared_ptr<ServedCall>)>;

  // Throws std::runtime_error if `page` is not a client's.
  RingPeer(std::shared_ptr<Handler> handler, OwnedFd socket, const OwnedFd& page, std::shared_ptr<MailboxCount> count);
  int fd() const { return socket_.get(); }
  // Receives up to a few packets. False: the client has gone, or violates the protocol.
  bool receive();
  bool has_requests() const {
    return held_ != nullptr || pending_ != 0 || page()->requested.load(std::memory_order_seq_cst) != 0;
  }
  // Whether it can be served between two blocks of another's request: it sees its own writes, so nothing overtakes
  // those.
  bool may_be_brief() const { return !is_at_work_ && held_ == nullptr && has_requests(); }
  // Performs one request; `waits` gets a call that has no answer yet. Between blocks a longer one is held for later.
  // False: the client violates the protocol.
  bool serve(const Waits& waits, const ServingTurn& serving);
  // Whether a request of it is being performed, so that it must stay.
  bool is_at_work() const { return is_at_work_; }
  // Whether it has lost its rights.
  bool is_over() const { return handler_->is_over(); }
  // Records that it has gone while it was at work.
  void go() { has_gone_ = true; }

 private:
  // Lives as long as a call uses it.
  struct Mailbox {
    Mailbox(SharedMapping memory, const Notice& notice, std::shared_ptr<MailboxCount> count);
    ~Mailbox() { --count->now; }
    MailboxControl* control() const { return reinterpret_cast<MailboxControl*>(memory.data()); }
    void answer(size_t bytes) const;
    SharedMapping memory;
    char *request, *reply;
    size_t request_bytes, reply_bytes;
    std::shared_ptr<MailboxCount> count;
  };

  class MailboxReply;

  std::shared_ptr<ServedCall> next_call();
  RequestedPage* page() const { return reinterpret_cast<RequestedPage*>(page_.data()); }
  void add(Notice notice, const OwnedFd& fd);

  const std::shared_ptr<Handler> handler_;
  OwnedFd socket_;
  SharedMapping page_;
  std::shared_ptr<MailboxCount> count_;
  std::array<std::shared_ptr<Mailbox>, kMaxMailboxes> mailboxes_;
  bool has_gone_ = false;  // it left while its call waited, or violated the protocol
  bool is_at_work_ = false;
  std::shared_ptr<ServedCall> held_;
  uint64_t pending_ = 0;  // a bit for each mailbox whose request was seen
  size_t next_ = 0;       // mailbox to check first, so that none is served before another for ever
};

}  // namespace geartrain
