// One frame at a shard: its operations, done in order, and its reply, written where the carrier wants it.
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

// Where the reply to one frame goes, if it is written.
class ReplyPlace {
 public:
  virtual ~ReplyPlace() = default;
  // Once or twice, the first time before anything is begun: room for a reply of at least so many bytes, and of up to `most_bytes` with whatever may be refused. It stays until the
  // answer. Throws a Fault if there is none.
  virtual std::span<char> room(size_t least_bytes, size_t most_bytes) = 0;
  // Once: the reply is there, in the room's first bytes. What is destroyed without it tells the caller, if it can, that none comes.
  virtual void answer(size_t bytes) noexcept = 0;
  virtual Carrier carrier() const = 0;
};

// When a call is performed.
struct ServingTurn {
  OtherCallers* others = nullptr;  // as in Asker; null: this is between two blocks of another's request
  bool has_turn = false;           // as in Asker
  bool looks_first = false;        // whether whoever asked has left
  bool is_between() const { return others == nullptr; }
};

// Thread-safe. Some operations have their outcome later, on another thread: it lives until then. All memory that an answer takes is
// taken before anything is begun: a write that was done is never answered as if it were not.
class ServedCall : public std::enable_shared_from_this<ServedCall> {
 public:
  // `has_left` is asked until perform() returns. The frame must have begun with `header`. `place` is asked and told by whoever brings the last
  // outcome.
  ServedCall(std::shared_ptr<Handler> handler, const FrameHeader& header, std::unique_ptr<ReplyPlace> place, HasLeft has_left);
  // Reads what the frame asks for; its rows stay there until perform() returns. False: it cannot be read, and was refused.
  bool read(const char* frame, size_t bytes) noexcept;
  // Whether all that it asks for are pulls, together no larger than a block, and of no step of a group.
  bool is_brief_reading() const;
  // Does what was read, unless whoever asked has left. Returns whether outcomes are still due.
  bool perform(const ServingTurn& serving) noexcept;
  bool is_waiting();
  // Answers now; what has no outcome yet is StepPending.
  void answer_now() noexcept;
  // Answers so, in the place of perform().
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
  HasLeft has_left_;  // until perform() returns
  std::span<char> room_;
  ParsedRequest request_;
  ReplyLayout layout_;
  std::vector<ReplyResult> results_;
  std::mutex mutex_;
  std::vector<bool> is_due_;  // of each operation
  RowsAfter after_;
  size_t written_after_ = 0;  // the pull whose rows its push has brought; 0: none
  size_t num_due_ = 0;
  bool has_writes_ = false, is_answered_ = false;
  bool is_lost_ = false;  // an outcome is not known here
  std::optional<std::string> ended_with_;  // the name of a fault; none: it ended well
};

}  // namespace geartrain
