#include "client/frame_call.hpp"

#include <atomic>
#include <cstring>

namespace geartrain {
namespace {

std::atomic<uint64_t> next_number{1};

const int64_t* ids_of(const Operation& operation) {
  return std::visit([](const auto& request) { return request.ids; }, operation.request);
}

size_t count_of(const Operation& operation) {
  return std::visit([](const auto& request) { return static_cast<size_t>(request.count); }, operation.request);
}

}  // namespace

FrameCall::FrameCall(Connection& connection, std::span<const Operation> operations, double seconds, bool may_wait)
    : layout_(lay_out_request(operations)), number_(next_number.fetch_add(1, std::memory_order_relaxed)) {
  expected_.reserve(operations.size());
  for (const Operation& operation : operations) {
    const auto* pull = std::get_if<PullRequest>(&operation.request);
    expected_.push_back(pull == nullptr ? ReplyRows{} : reply_rows(*pull, pull->present != nullptr));
  }
  call_ = connection.begin(layout_.frame_bytes, most_reply_bytes(lay_out_reply(expected_)), may_wait);
  char* frame = call_->request();
  write_request_headers(frame, layout_, number_, seconds, operations);
  for (size_t i = 0; i < operations.size(); ++i) {
    const OperationPlace& place = layout_.places[i];
    const size_t bytes = count_of(operations[i]) * sizeof(int64_t);
    if (bytes != 0) std::memcpy(frame + place.ids, ids_of(operations[i]), bytes);
    std::memset(frame + place.ids + bytes, 0, place.rows - place.ids - bytes);
    const size_t rows_end = place.rows + place.rows_bytes, end = place.occurrences + place.occurrences_bytes;
    std::memset(frame + rows_end, 0, place.occurrences - rows_end);
    if (place.occurrences_bytes != 0)
      std::memcpy(frame + place.occurrences, std::get<PushRequest>(operations[i].request).batch.occurrences, place.occurrences_bytes);
    std::memset(frame + end, 0, place.end - end);
  }
}

void FrameCall::send(SteadyTime deadline, const std::function<bool()>& look) { call_->send(deadline, look); }

std::vector<ParsedReply> FrameCall::replies() {
  const auto frame = call_->reply();
  return parse_reply(frame.data(), frame.size(), number_, expected_);
}

}  // namespace geartrain
