#include "client/frame_call.hpp"

#include <atomic>

namespace geartrain {
namespace {

std::atomic<uint64_t> next_number{1};

}  // namespace

FrameCall::FrameCall(Connection& connection, std::span<const Operation> operations, double seconds, bool may_wait)
    : layout_(lay_out_request(operations)), number_(next_number.fetch_add(1, std::memory_order_relaxed)) {
  expected_.reserve(operations.size());
  for (const Operation& operation : operations) {
    const auto* pull = std::get_if<PullRequest>(&operation.request);
    expected_.push_back(pull == nullptr ? ReplyRows{} : reply_rows(*pull, pull->present != nullptr));
  }
  call_ = connection.begin(layout_.frame_bytes, max_reply_bytes(lay_out_reply(expected_)), may_wait);
  write_request(call_->request(), layout_, number_, seconds, operations);
}

void FrameCall::send(SteadyTime deadline, const std::function<bool()>& look) { call_->send(deadline, look); }

std::vector<ParsedReply> FrameCall::replies() {
  const auto frame = call_->reply();
  return parse_reply(frame.data(), frame.size(), number_, expected_);
}

}  // namespace geartrain
