// What a shard's data plane hands its requests to: the engine, or a stand-in of tests.
#pragma once

#include <functional>
#include <string>

#include "calls/call.hpp"
#include "calls/call_counters.hpp"

namespace geartrain {

// Whether nobody waits for the call any more. Asked by the thread that was given it, while it waits for the shard's turn: what has
// not begun then need not. Costs some system calls.
using HasLeft = std::function<bool()>;

// For whom a call is performed, and when.
struct Asker {
  HasLeft has_left;
  OtherCallers* others = nullptr;  // whom else the thread serves between the blocks of a large request
  bool has_turn = false;           // the thread has the shard's turn, for a request of someone else
};

// Called by any thread, several at once. Every method may throw a Fault instead of what it does.
class Handler {
 public:
  virtual ~Handler() = default;
  // Returns the writes that the shard has applied to the table.
  virtual int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request, const Asker& asker) = 0;
  // `completion` is called unless the method throws. `after`: if not null and the push is of no group, it may bring its rows at once.
  virtual void push(const CallContext& context, const std::string& table, const PushRequest& request, const Asker& asker,
                    Completion completion, RowsAfter* after) = 0;
  virtual void assign(const CallContext& context, const std::string& table, const AssignRequest& request, const Asker& asker,
                      Completion completion) = 0;
  // Before anything that was done is acknowledged; after a Fault nothing of the frame is.
  virtual void before_reply(bool has_writes) = 0;
  // Whether the connection that it serves has lost its rights, and is to end.
  virtual bool is_over() const { return false; }
  // Where its calls are counted; null: nowhere.
  virtual CallCounters* counters() { return nullptr; }
};

}  // namespace geartrain
