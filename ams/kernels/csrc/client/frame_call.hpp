// A frame of requests over a connection to one shard, and its reply.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "carriers/connection.hpp"
#include "frames/frame.hpp"

namespace geartrain {

// Used by one thread.
class FrameCall {
 public:
  // Writes all of the request except the rows of its writes; `seconds`: the caller's time limit. Throws Lost, Full, or
  // the Fault of a request too large for a frame. `may_wait`: see Connection::begin.
  FrameCall(Connection& connection, std::span<const Operation> operations, double seconds, bool may_wait = true);
  // Destination of the rows of operation i, one after the other, before send().
  char* rows(size_t i) { return call_->request() + layout_.places[i].rows; }
  // Alternatively their location, until send() has returned.
  void attach(size_t i, const char* rows) { call_->attach(layout_.places[i].rows, rows, layout_.places[i].rows_bytes); }
  // See Connection::Call::send.
  void send(SteadyTime deadline, const std::function<bool()>& look);
  // See Connection::Call::wait.
  bool wait(SteadyTime deadline, const std::function<bool()>& look, bool may_spin = true) {
    return call_->wait(deadline, look, may_spin);
  }
  // Replies to each operation, once the reply has arrived; rows stay in the frame. Throws the Fault of a refused frame.
  std::vector<ParsedReply> replies();

 private:
  RequestLayout layout_;
  std::vector<ReplyRows> expected_;
  uint64_t number_;
  std::unique_ptr<Connection::Call> call_;
};

}  // namespace geartrain
