// Call served at a shard: one frame with its operations, done in order, and its reply, written to the carrier's memory.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "calls/handler.hpp"
#include "frames/frame.hpp"

namespace geartrain {

// Destination of the reply to one frame.
class ReplyPlace {
 public:
  virtual ~ReplyPlace() = default;
  // Called once or twice, the first time before anything is begun: returns room for a reply of at least `min_bytes`,
  // and of up to `most_bytes` with all possible refusals. It stays until the answer. Throws a Fault if there is none.
  virtual std::span<char> room(size_t min_bytes, size_t most_bytes) = 0;
  // Called once: the reply is in the room's first bytes. If it is destroyed without this, the caller learns, if
  // possible, that no reply comes.
  virtual void answer(size_t bytes) noexcept = 0;
  virtual Carrier carrier() const = 0;
};

// Circumstances in which a call is performed.
struct ServingTurn {
  OtherCallers* others = nullptr;  // as in Asker; null: this is between two blocks of another request
  bool has_turn = false;           // as in Asker
  bool looks_first = false;        // whether to check first that the caller has not left
  bool is_between() const { return others == nullptr; }
};

// Thread-safe. Some operations complete later, on another thread: it lives until then. All memory of an answer is
// allocated before anything is begun, so that the outcome of an applied write can always be reported.
class ServedCall : public std::enable_shared_from_this<ServedCall> {
 public:
  // `has_left` is called until perform() returns. The frame must have begun with `header`. `place` is used by the
  // thread of the last outcome.
  ServedCall(std::shared_ptr<Handler> handler, const FrameHeader& header, std::unique_ptr<ReplyPlace> place,
             IsCancelled has_left);
  // Decodes the frame; its rows stay there until perform() returns. False: it is invalid, and was refused.
  bool read(const char* frame, size_t bytes) noexcept;
  // Returns whether all operations are pulls, together no larger than a block, and of no step of a group.
  bool is_brief_reading() const;
  // Performs the operations, unless the caller has left. Returns whether outcomes are still due.
  bool perform(const ServingTurn& serving) noexcept;
  bool is_waiting();
  // Answers now; operations without an outcome get StepPending.
  void answer_now() noexcept;
  // Answers with `fault`, instead of perform().
  void refuse(const Fault& fault) noexcept;
  double seconds() const { return header_.seconds; }

 private:
  using Clock = std::chrono::steady_clock;

  void prepare();
  void perform_one(size_t index, const Asker& asker);
  PullRequest* pull_of(size_t index);
  bool pulls_what_was_pushed(size_t index);
  void settle(size_t index, const Outcome& outcome) noexcept;
  void lose(size_t index) noexcept;
  bool settled() noexcept;
  void write_answer() noexcept;
  void count(Clock::duration took) noexcept;
  void note_fault(const Fault& fault) noexcept;

  const std::shared_ptr<Handler> handler_;
  const FrameHeader header_;
  const Clock::time_point began_ = Clock::now();
  const Carrier carrier_;
  CallKind kind_ = CallKind::unread;
  size_t reply_bytes_ = 0;
  std::unique_ptr<ReplyPlace> place_;
  IsCancelled has_left_;  // until perform() returns
  std::span<char> room_;
  ParsedRequest request_;
  ReplyLayout layout_;
  std::vector<ReplyResult> results_;
  std::mutex mutex_;
  std::vector<bool> is_due_;  // whether each operation has no outcome yet
  PostPushRows after_;
  size_t written_after_ = 0;  // index of the pull whose rows its push has written; 0: none
  size_t num_due_ = 0;
  bool has_writes_ = false, is_answered_ = false;
  bool is_lost_ = false;  // whether an outcome is unknown here
  std::optional<std::string> ended_with_;  // name of a fault; none: success
};

}  // namespace geartrain
