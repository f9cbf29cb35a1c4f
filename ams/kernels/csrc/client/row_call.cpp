#include "client/row_call.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<uint64_t> next_number{1};

}  // namespace

RowCall::RowCall(Connection& connection, const Operation& operation, double seconds) : number_(next_number.fetch_add(1)) {
  const std::span<const Operation> operations(&operation, 1);
  const RequestLayout layout = lay_out_request(operations);
  if (const auto* pull = std::get_if<PullRequest>(&operation.request)) rows_ = reply_rows(*pull, pull->present != nullptr);
  call_ = connection.begin(layout.frame_bytes, most_reply_bytes(lay_out_reply({&rows_, 1})));
  write_request(call_->request(), layout, number_, seconds, operations);
  call_->send(seconds > 0 ? Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)))
                          : SteadyTime::max(),
              nullptr);
}

ParsedReply RowCall::parsed() {
  const auto frame = call_->reply();
  std::vector<ParsedReply> replies = parse_reply(frame.data(), frame.size(), number_, {&rows_, 1});
  if (const auto* fault = std::get_if<Fault>(&replies.front().outcome)) throw *fault;
  return std::move(replies.front());
}

Done RowCall::done() { return std::get<Done>(parsed().outcome); }

void RowCall::place(const PullRequest& request) {
  const ParsedReply reply = parsed();
  const size_t row_bytes = static_cast<size_t>(request.dim) * item_bytes(request.dtype);
  const auto count = static_cast<size_t>(request.count);
  if (count * row_bytes != rows_.rows_bytes || (request.present != nullptr && count != rows_.present_bytes))
    throw Fault("InvalidRows", "the rows that came are not those that out is for");
  if (request.positions == nullptr) {
    if (count != 0) std::memcpy(request.rows, reply.rows, count * row_bytes);
    for (size_t i = 0; request.present != nullptr && i < count; ++i) request.present[i] = reply.present[i] != 0;
    return;
  }
  for (size_t i = 0; i < count; ++i)
    if (request.positions[i] < 0 || request.positions[i] >= request.size)
      throw Fault("InvalidRows", "position " + std::to_string(request.positions[i]) + " at " + std::to_string(i) + " is outside of " +
                                     std::to_string(request.size) + " rows of out");
  for (size_t i = 0; i < count; ++i) {
    const auto to = static_cast<size_t>(request.positions[i]);
    std::memcpy(request.rows + to * row_bytes, reply.rows + i * row_bytes, row_bytes);
    if (request.present != nullptr) request.present[to] = reply.present[i] != 0;
  }
}

}  // namespace geartrain
