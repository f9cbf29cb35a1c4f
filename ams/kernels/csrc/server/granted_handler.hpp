// Handler of a connection with restricted rights: passes on what its grant allows.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "calls/grant.hpp"
#include "calls/handler.hpp"

namespace geartrain {

// One for each connection; used by the thread that performs its requests.
class GrantedHandler final : public Handler {
 public:
  GrantedHandler(std::shared_ptr<Handler> handler, std::shared_ptr<Grant> grant)
      : handler_(std::move(handler)), grant_(std::move(grant)) {}

  int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request,
               const Asker& asker) override {
    require(table, kMayRead);
    return handler_->pull(context, table, request, asker);
  }
  void push(const CallContext& context, const std::string& table, const PushRequest& request, const Asker& asker,
            Completion completion, PostPushRows* after) override {
    require(table, kMayWrite);
    require_own(table, context.stream);
    if (request.group) require_own(table, request.group->job);
    // the pull that it would save is refused on its own
    if (after != nullptr && !may(table, kMayRead)) after = nullptr;
    handler_->push(context, table, request, asker, std::move(completion), after);
  }
  void assign(const CallContext& context, const std::string& table, const AssignRequest& request, const Asker& asker,
              Completion completion) override {
    require(table, kMayWrite);
    require_own(table, context.stream);
    handler_->assign(context, table, request, asker, std::move(completion));
  }
  void before_reply(bool has_writes) override { handler_->before_reply(has_writes); }
  bool is_over() const override { return grant_->is_over(); }
  CallCounters* counters() override { return handler_->counters(); }

 private:
  static constexpr size_t kMaxKnown = 4096;

  bool may(const std::string& table, uint32_t right) {
    auto known = known_.find(table);
    if (known == known_.end()) {
      if (known_.size() >= kMaxKnown) known_.clear();  // clients may send any number of names
      known = known_.emplace(table, grant_->rights(table)).first;
    }
    return (known->second & right) != 0;
  }
  void require(const std::string& table, uint32_t right) {
    // The caller retries over a connection with its current token and certificate; this one is closed soon.
    if (grant_->is_over())
      throw Fault("ShardUnavailable", "the token or certificate of this connection is no longer valid; reconnect");
    if (!may(table, right)) refuse(table, right);
  }
  void require_own(const std::string& table, const std::string& name) {
    if (!name.empty() && !grant_->owns(name)) refuse(table, kMayWrite);
  }
  [[noreturn]] void refuse(const std::string& table, uint32_t right) {
    grant_->refused(table, right);
    throw Fault("AccessDenied", kRefusal);
  }

  // Reveals nothing about existing tables.
  static constexpr const char* kRefusal =
      "the token of this process does not give the right to this call; the shard's log names the table and the right. "
      "Have a token made that gives it ('geartrain certs token'), and name its file in security.token";

  const std::shared_ptr<Handler> handler_;
  const std::shared_ptr<Grant> grant_;
  std::unordered_map<std::string, uint32_t> known_;
};

}  // namespace geartrain
