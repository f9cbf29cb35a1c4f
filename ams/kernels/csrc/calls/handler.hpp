// Handler of the requests of a shard's data plane: the engine, or a stand-in of tests.
#pragma once

#include <functional>
#include <string>

#include "calls/call.hpp"
#include "calls/call_counters.hpp"

namespace geartrain {

// Whether the caller has left. Asked by the thread of the call while it waits for the shard's turn: a call that has not
// started is then dropped. Costs some system calls.
using IsCancelled = std::function<bool()>;

// Circumstances of a call.
struct Asker {
  IsCancelled has_left;
  OtherCallers* others = nullptr;  // other callers that the thread serves between the blocks of a large request
  bool has_turn = false;           // the thread has the shard's turn, for another caller's request
};

// Called by any thread, several at once. Every method may throw a Fault instead.
class Handler {
 public:
  virtual ~Handler() = default;
  // Returns the writes that the shard has applied to the table.
  virtual int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request,
                       const Asker& asker) = 0;
  // `completion` is called unless the method throws. `after`: if not null and the push has no group, its rows may be
  // read at once.
  virtual void push(const CallContext& context, const std::string& table, const PushRequest& request,
                    const Asker& asker, Completion completion, PostPushRows* after) = 0;
  virtual void assign(const CallContext& context, const std::string& table, const AssignRequest& request,
                      const Asker& asker, Completion completion) = 0;
  // Called before any acknowledgement; after a Fault nothing of the frame is acknowledged.
  virtual void before_reply(bool has_writes) = 0;
  // Whether its connection has lost its rights, and must end.
  virtual bool is_over() const { return false; }
  // Counters of its calls; null: none.
  virtual CallCounters* counters() { return nullptr; }
};

}  // namespace geartrain
