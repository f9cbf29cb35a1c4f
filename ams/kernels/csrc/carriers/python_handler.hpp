// A handler that is an object of Python: for what a shard does there.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "carriers/handler.hpp"

namespace geartrain {

// `shard` has methods of the same names (ams/server/data_plane.py). Arrays are views that end with the call, or with its outcome.
class PythonHandler : public Handler {
 public:
  explicit PythonHandler(nanobind::object shard);
  void pull(const CallContext& context, const std::string& table, const PullRequest& request) override;
  void push(const CallContext& context, const std::string& table, const PushRequest& request, Completion completion) override;
  void assign(const CallContext& context, const std::string& table, const AssignRequest& request, Completion completion) override;
  void before_reply(bool has_writes) override;

 private:
  std::shared_ptr<nanobind::object> shard_;
};

}  // namespace geartrain
