// Handler of a shard's data plane that calls its engine.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "calls/handler.hpp"
#include "engine/engine.hpp"
#include "base/failpoint.hpp"

namespace geartrain {

class EngineHandler final : public Handler {
 public:
  explicit EngineHandler(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request,
               const Asker& asker) override {
    return engine_->pull(context, table, request, caller_of(asker));
  }
  // Foreign clients may send any ids, so they are not taken as distinct.
  void push(const CallContext& context, const std::string& table, const PushRequest& request, const Asker& asker,
            Completion completion, PostPushRows* after) override {
    engine_->push(context, table, request, false, completion, caller_of(asker), after);
  }
  void assign(const CallContext& context, const std::string& table, const AssignRequest& request, const Asker& asker,
              Completion completion) override {
    engine_->assign(context, table, request, false, completion, caller_of(asker));
  }
  void before_reply(bool has_writes) override {
    if (has_writes) failpoint("shard.reply.before");
    engine_->check_lease();
  }
  CallCounters* counters() override { return &engine_->counters(); }

 private:
  static Caller caller_of(const Asker& asker) {
    Caller caller;
    caller.look = [&asker] {
      if (asker.has_left()) throw Fault("ShardUnavailable", "the caller stopped waiting");
      return false;
    };
    caller.has_turn = asker.has_turn;
    caller.others = asker.others;
    return caller;
  }

  const std::shared_ptr<Engine> engine_;
};

}  // namespace geartrain
