#include "carriers/served_call.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "calls/fault.hpp"
#include "machine/pauses.hpp"

namespace geartrain {
namespace {

// Answer if the outcome is unknown: the caller retries under the same number, and a write gets its recorded answer.
const Fault& unknown_outcome() {
  static const Fault fault("ShardUnavailable",
                           "the shard ran out of memory and cannot tell whether it did this call; retry it");
  return fault;
}

const Fault& pending() {
  static const Fault fault("StepPending", "other ranks of the sync group have not pushed yet; retry");
  return fault;
}

}  // namespace

ServedCall::ServedCall(std::shared_ptr<Handler> handler, const FrameHeader& header, std::unique_ptr<ReplyPlace> place,
                       IsCancelled has_left)
    : handler_(std::move(handler)),
      header_(header),
      carrier_(place->carrier()),
      place_(std::move(place)),
      has_left_(std::move(has_left)) {
  unknown_outcome();  // constructed now, while there is memory for it
  pending();
}

bool ServedCall::read(const char* frame, size_t bytes) noexcept {
  try {
    request_ = parse_request(frame, bytes);
    if (request_.header.check != header_.check) throw Fault("ProtocolError", "the client changed the frame meanwhile");
    const auto& operations = request_.operations;
    const size_t asked = operations.front().request.index();
    const bool is_alike =
        std::ranges::all_of(operations, [&](const Operation& operation) { return operation.request.index() == asked; });
    kind_ = is_alike ? static_cast<CallKind>(asked) : CallKind::several;
    return true;
  } catch (...) {
    refuse(fault_in_flight("the shard"));
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

void ServedCall::prepare() {
  const size_t count = request_.operations.size();
  std::vector<ReplyRows> rows(count);
  results_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const auto* pull = std::get_if<PullRequest>(&request_.operations[i].request);
    if (pull != nullptr) results_[i].rows = rows[i] = reply_rows(*pull, request_.wants_present[i]);
    has_writes_ |= pull == nullptr;
  }
  layout_ = lay_out_reply(rows);
  room_ = place_->room(layout_.end, max_reply_bytes(layout_));
  is_due_.assign(count, true);
  num_due_ = count + 1;  // one more for this thread, so that no outcome answers before all operations are started
}

bool ServedCall::perform(const ServingTurn& serving) noexcept {
  const Asker asker{std::exchange(has_left_, nullptr), serving.others, serving.has_turn};
  try {
    if (serving.looks_first && asker.has_left()) throw Fault("ShardUnavailable", "the caller stopped waiting");
    prepare();
  } catch (...) {
    refuse(fault_in_flight("the shard"));
    return false;
  }
  for (size_t i = 0; i < request_.operations.size(); ++i) {
    try {
      perform_one(i, asker);
    } catch (const Fault& fault) {
      try {
        settle(i, fault);
      } catch (const std::bad_alloc&) {  // no memory for a copy
        lose(i);
      }
    } catch (...) {
      lose(i);
    }
  }
  const bool is_answered = settled();
  const auto took = Clock::now() - began_;
  if (CallCounters* counters = handler_->counters())
    counters->add_busy(serving.is_between() ? Clock::duration() : took);
  if (is_answered) count(took);
  return !is_answered;
}

// Returns the pull of an operation, with the destination of its rows; null: it is no pull.
PullRequest* ServedCall::pull_of(size_t index) {
  auto* pull = std::get_if<PullRequest>(&request_.operations[index].request);
  if (pull == nullptr) return nullptr;
  pull->rows = room_.data() + layout_.rows[index];
  if (request_.wants_present[index])
    pull->present = reinterpret_cast<uint8_t*>(pull->rows) + results_[index].rows.rows_bytes;
  return pull;
}

// Whether an operation is a push, and the next one a pull of the pushed rows and nothing else.
bool ServedCall::pulls_what_was_pushed(size_t index) {
  if (index + 1 == request_.operations.size()) return false;
  const Operation &first = request_.operations[index], &second = request_.operations[index + 1];
  const auto* push = std::get_if<PushRequest>(&first.request);
  const auto* pull = std::get_if<PullRequest>(&second.request);
  return push != nullptr && pull != nullptr && !push->group && !pull->required_sync &&
         !request_.wants_present[index + 1] && first.table == second.table &&
         first.context.table_incarnation == second.context.table_incarnation && push->dim == pull->dim &&
         push->count == pull->count && std::equal(push->ids, push->ids + push->count, pull->ids);
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

void ServedCall::settle(size_t index, const Outcome& outcome) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (is_answered_ || !is_due_[index]) return;
    is_due_[index] = false;
    try {
      results_[index].outcome = outcome;
    } catch (...) {  // no memory for a copy
      is_lost_ = true;
    }
  }
  if (settled()) count(Clock::now() - began_);
}

void ServedCall::lose(size_t index) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (is_answered_ || !is_due_[index]) return;
    is_due_[index] = false;
    is_lost_ = true;
  }
  if (settled()) count(Clock::now() - began_);
}

// Counts down the due outcomes. Answers if none is left, and returns whether it did.
bool ServedCall::settled() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (is_answered_ || --num_due_ != 0) return false;
    is_answered_ = true;
  }
  write_answer();
  return true;
}

bool ServedCall::is_waiting() {
  const std::lock_guard lock(mutex_);
  return !is_answered_;
}

void ServedCall::answer_now() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_answered_, true)) return;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (!is_due_[i]) continue;
      try {
        results_[i].outcome = pending();
      } catch (...) {
        is_lost_ = true;
      }
    }
  }
  write_answer();
  count(Clock::now() - began_);
}

void ServedCall::refuse(const Fault& fault) noexcept {
  is_answered_ = true;
  try {
    if (room_.size() < kMinRefusalBytes) room_ = place_->room(kMinRefusalBytes, kMaxRefusalBytes);
    reply_bytes_ = write_refusal(room_.data(), room_.size(), header_.number, 1, fault);
    place_->answer(reply_bytes_);
  } catch (...) {  // no memory for a message
  }
  place_.reset();
  note_fault(fault);
  count(Clock::now() - began_);
}

// Called by the thread that has set is_answered_, without the mutex: it may wait for the interpreter lock (armed
// failpoints), whose holder may wait for the mutex.
void ServedCall::write_answer() noexcept {
  const auto refuse_all = [this](const Fault& fault) {
    reply_bytes_ = write_refusal(room_.data(), room_.size(), header_.number, results_.size(), fault);
    place_->answer(reply_bytes_);
    note_fault(fault);
  };
  try {
    handler_->before_reply(has_writes_);
    if (is_lost_) refuse_all(unknown_outcome());
    else {
      reply_bytes_ = write_reply(room_.data(), room_.size(), layout_, header_.number, results_);
      place_->answer(reply_bytes_);
      const auto refused = std::ranges::find_if(
          results_, [](const ReplyResult& result) { return std::holds_alternative<Fault>(result.outcome); });
      if (refused != results_.end()) note_fault(std::get<Fault>(refused->outcome));
    }
  } catch (const Fault& fault) {
    refuse_all(fault);
  } catch (...) {
    refuse_all(unknown_outcome());
  }
  place_.reset();
}

// Called once, by the thread that answered.
void ServedCall::count(Clock::duration took) noexcept {
  if (CallCounters* counters = handler_->counters())
    counters->add(carrier_, kind_, took, sizeof(FrameHeader) + header_.body_bytes, reply_bytes_,
                  ended_with_ ? &*ended_with_ : nullptr);
}

void ServedCall::note_fault(const Fault& fault) noexcept {
  try {
    ended_with_ = fault.name;
  } catch (...) {  // no memory for the fault's name
  }
}

}  // namespace geartrain
