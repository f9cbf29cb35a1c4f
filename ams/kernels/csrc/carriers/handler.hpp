// What a shard's data plane hands its requests to: the engine, or a stand-in of tests.
#pragma once

#include <string>

#include "engine/call.hpp"

namespace geartrain {

// Called by any thread, several at once. Every method may throw a Fault instead of what it does.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void pull(const CallContext& context, const std::string& table, const PullRequest& request) = 0;
  // `completion` is called unless the method throws.
  virtual void push(const CallContext& context, const std::string& table, const PushRequest& request, Completion completion) = 0;
  virtual void assign(const CallContext& context, const std::string& table, const AssignRequest& request, Completion completion) = 0;
  // Before anything that was done is acknowledged; after a Fault nothing of the frame is.
  virtual void before_reply(bool has_writes) = 0;
};

}  // namespace geartrain
