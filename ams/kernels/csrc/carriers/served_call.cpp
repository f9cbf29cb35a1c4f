#include "carriers/served_call.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "machine/pauses.hpp"

namespace geartrain {
namespace {

Fault fault_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const Fault& fault) {
    return fault;
  } catch (const std::bad_alloc&) {
    return Fault("OutOfMemory", "the shard is out of memory: the system gives it no more; the call changed nothing");
  } catch (const std::exception& other) {
    return Fault("InternalError", other.what());
  } catch (...) {
    return Fault("InternalError", "an unknown error");
  }
}

}  // namespace

ServedCall::ServedCall(std::shared_ptr<Handler> handler, const FrameHeader& header, std::unique_ptr<ReplyPlace> place,
                       HasLeft has_left)
    : handler_(std::move(handler)), header_(header), place_(std::move(place)), has_left_(std::move(has_left)) {}

bool ServedCall::read(const char* frame, size_t bytes) {
  try {
    request_ = parse_request(frame, bytes);
    if (request_.header.check != header_.check) throw Fault("ProtocolError", "the frame was changed while it was read");
    return true;
  } catch (...) {
    refuse(fault_of(std::current_exception()));
    return false;
  }
}

bool ServedCall::is_brief_reading() const {
  size_t bytes = 0;
  for (const Operation& operation : request_.operations) {
    const auto* pull = std::get_if<PullRequest>(&operation.request);
    if (pull == nullptr || pull->required_sync) return false;
    bytes += static_cast<size_t>(pull->count) * static_cast<size_t>(pull->dim) * item_bytes(pull->dtype);
    if (bytes > kBlockBytes) return false;
  }
  return true;
}

void ServedCall::perform(const Moment& moment) {
  const Asker asker{std::exchange(has_left_, nullptr), moment.meanwhile, moment.has_turn};
  if (moment.looks_first && asker.has_left()) return refuse(Fault("ShardUnavailable", "the caller has gone"));
  try {
    for (size_t i = 0; i < request_.operations.size(); ++i) {
      const auto* pull = std::get_if<PullRequest>(&request_.operations[i].request);
      rows_.push_back(pull != nullptr ? reply_rows(*pull, request_.wants_present[i]) : ReplyRows{});
      has_writes_ |= pull == nullptr;
    }
    layout_ = lay_out_reply(rows_);
    room_ = place_->room(layout_.end, most_reply_bytes(layout_));
    outcomes_.resize(request_.operations.size());
    num_due_ = outcomes_.size() + 1;  // and one for this thread, so that no outcome answers before all are begun
  } catch (...) {
    refuse(fault_of(std::current_exception()));
    return;
  }
  for (size_t i = 0; i < request_.operations.size(); ++i) {
    try {
      perform_one(i, asker);
    } catch (...) {
      settle(i, fault_of(std::current_exception()));
    }
  }
  {
    const std::lock_guard lock(mutex_);
    if (--num_due_ != 0 || std::exchange(is_answered_, true)) return;
  }
  write_answer();
}

// The pull that an operation is, with the place of its rows; null: it is none.
PullRequest* ServedCall::pull_of(size_t index) {
  auto* pull = std::get_if<PullRequest>(&request_.operations[index].request);
  if (pull == nullptr) return nullptr;
  pull->rows = room_.data() + layout_.rows[index];
  if (request_.wants_present[index]) pull->present = reinterpret_cast<uint8_t*>(pull->rows) + rows_[index].rows_bytes;
  return pull;
}

// Whether an operation is a push, and the next one a pull of its rows and nothing else.
bool ServedCall::pulls_what_was_pushed(size_t index) {
  if (index + 1 == request_.operations.size()) return false;
  const Operation &first = request_.operations[index], &second = request_.operations[index + 1];
  const auto* push = std::get_if<PushRequest>(&first.request);
  const auto* pull = std::get_if<PullRequest>(&second.request);
  return push != nullptr && pull != nullptr && !push->group && !pull->required_sync && !request_.wants_present[index + 1] &&
         first.table == second.table && first.context.table_incarnation == second.context.table_incarnation &&
         push->dim == pull->dim && push->count == pull->count &&
         std::equal(push->ids, push->ids + push->count, pull->ids);
}

void ServedCall::perform_one(size_t index, const Asker& asker) {
  const Operation& operation = request_.operations[index];
  const auto later = [self = shared_from_this(), index](const Outcome& outcome) { self->settle(index, outcome); };
  if (const PullRequest* pull = pull_of(index)) {
    if (written_after_ != 0 && written_after_ == index) return settle(index, Done{.writes = after_.writes});
    settle(index, Done{.writes = handler_->pull(operation.context, operation.table, *pull, asker)});
  } else if (const auto* push = std::get_if<PushRequest>(&operation.request)) {
    const bool is_both = pulls_what_was_pushed(index);
    if (is_both) {
      const PullRequest* pull = pull_of(index + 1);
      after_ = {.rows = pull->places(), .dtype = pull->dtype};
    }
    handler_->push(operation.context, operation.table, *push, asker, later, is_both ? &after_ : nullptr);
    if (is_both && after_.writes != 0) written_after_ = index + 1;
  } else {
    handler_->assign(operation.context, operation.table, std::get<AssignRequest>(operation.request), asker, later);
  }
}

void ServedCall::settle(size_t index, Outcome outcome) {
  {
    const std::lock_guard lock(mutex_);
    if (is_answered_ || outcomes_[index]) return;
    outcomes_[index] = std::move(outcome);
    if (--num_due_ != 0) return;
    is_answered_ = true;
  }
  write_answer();
}

bool ServedCall::is_waiting() {
  const std::lock_guard lock(mutex_);
  return !is_answered_;
}

void ServedCall::answer_now() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_answered_, true)) return;
    for (auto& outcome : outcomes_)
      if (!outcome) outcome = Fault("StepPending", "other ranks of the sync group have not pushed yet; ask again");
  }
  write_answer();
}

void ServedCall::refuse(const Fault& fault) {
  is_answered_ = true;
  rows_.assign(1, {});
  layout_ = lay_out_reply(rows_);
  outcomes_.assign(1, fault);
  try {
    if (room_.size() < layout_.end) room_ = place_->room(layout_.end, most_reply_bytes(layout_));
  } catch (const std::exception&) {  // no room for a sentence: the caller's time-out tells
    return;
  }
  write_answer();
}

// By whoever has set is_answered_, without the mutex: it may wait for the interpreter lock (armed failpoints), whose holder may wait
// for the mutex.
void ServedCall::write_answer() {
  std::vector<ReplyResult> results;
  try {
    handler_->before_reply(has_writes_);
    for (size_t i = 0; i < outcomes_.size(); ++i) results.push_back({std::move(*outcomes_[i]), rows_[i]});
  } catch (...) {
    results.assign(outcomes_.size(), {fault_of(std::current_exception()), {}});
  }
  place_->answer(write_reply(room_.data(), room_.size(), layout_, header_.number, results));
  place_.reset();
}

}  // namespace geartrain
