// A frame of requests over a connection to one shard, and the reply to it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "carriers/connection.hpp"
#include "frames/frame.hpp"

namespace geartrain {

// Of one thread.
class FrameCall {
 public:
  // Writes all of the request but the rows of its writes; `seconds`: how long the caller means to wait. Throws Lost, Full, or the
  // Fault of what no frame can hold. `may_wait`: see Connection::begin.
  FrameCall(Connection& connection, std::span<const Operation> operations, double seconds, bool may_wait = true);
  // Where those of operation i are to be written before send(), one after the other.
  char* rows(size_t i) { return call_->request() + layout_.places[i].rows; }
  // Or where they lie until it has returned.
  void attach(size_t i, const char* rows) { call_->attach(layout_.places[i].rows, rows, layout_.places[i].rows_bytes); }
  // See Connection::Call::send.
  void send(SteadyTime deadline, const std::function<bool()>& look);
  // See Connection::Call::wait.
  bool wait(SteadyTime deadline, const std::function<bool()>& look, bool may_spin = true) {
    return call_->wait(deadline, look, may_spin);
  }
  // To each operation; rows lie in the frame. Once the reply is there. Throws the Fault that its frame is.
  std::vector<ParsedReply> replies();

 private:
  RequestLayout layout_;
  std::vector<ReplyRows> expected_;
  uint64_t number_;
  std::unique_ptr<Connection::Call> call_;
};

}  // namespace geartrain
