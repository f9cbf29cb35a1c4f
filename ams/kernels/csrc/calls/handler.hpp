// Handler of the requests of a shard's data plane: the engine, or a stand-in of tests.
#pragma once

#include <functional>
#include <string>

#include "calls/call.hpp"
#include "calls/call_counters.hpp"

namespace geartrain {

// Returns whether the caller has disconnected. The call's thread asks while it waits for the shard's lock: a call that
// has not started is then dropped. Costs some system calls.
using IsCancelled = std::function<bool()>;

// Caller of a request, as its carrier sees it.
struct Asker {
  IsCancelled has_left;
  OtherCallers* others = nullptr;  // requests that the thread serves between the blocks of a large request
  bool has_turn = false;           // the thread holds the shard's lock already, for another caller's request
};

// Thread-safe. Every method may throw a Fault.
class Handler {
 public:
  virtual ~Handler() = default;
  // Returns the number of writes that the shard has applied to the table.
  virtual int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request,
                       const Asker& asker) = 0;
  // Calls `completion` unless the method throws. `after`: null, or the output of a fused pull, for a push without a
  // group.
  virtual void push(const CallContext& context, const std::string& table, const PushRequest& request,
                    const Asker& asker, Completion completion, PostPushRows* after) = 0;
  virtual void assign(const CallContext& context, const std::string& table, const AssignRequest& request,
                      const Asker& asker, Completion completion) = 0;
  // Called before a reply is sent. If it throws a Fault, nothing of the frame is acknowledged.
  virtual void before_reply(bool has_writes) = 0;
  // Returns whether the connection's rights have ended; the carrier then closes it.
  virtual bool is_over() const { return false; }
  // Counters of the handler's calls; null: none.
  virtual CallCounters* counters() { return nullptr; }
};

}  // namespace geartrain
