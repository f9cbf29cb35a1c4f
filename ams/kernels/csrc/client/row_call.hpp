// A pull, push or assign over a connection to one shard.
#pragma once

#include <memory>
#include <string>

#include "carriers/connection.hpp"
#include "frames/frame.hpp"

namespace geartrain {

// Of one thread.
class RowCall {
 public:
  // Writes the request and sends it; `operation`'s arrays are read, and not needed after. `seconds`: how long the caller means to
  // wait. Throws Lost, Full, or the Fault of what no frame can hold.
  RowCall(Connection& connection, const Operation& operation, double seconds);
  // See Connection::Call::wait.
  bool wait(SteadyTime deadline, const std::function<bool()>& look) { return call_->wait(deadline, look); }
  // What became of a write. Once the reply is there. Throws the Fault that the shard answered, or that its frame is.
  Done done();
  // Of a pull: writes the rows, and which exist, to where `request` says. Throws as done() does; nothing was written then.
  void place(const PullRequest& request);

 private:
  ParsedReply parsed();

  std::unique_ptr<Connection::Call> call_;
  uint64_t number_;
  ReplyRows rows_;
};

}  // namespace geartrain
