// One frame at a shard: its operations, done in order, and its reply, written where the carrier wants it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "carriers/handler.hpp"
#include "frames/frame.hpp"

namespace geartrain {

// Thread-safe. Some operations have their outcome later, on another thread: it lives until then.
class ServedCall : public std::enable_shared_from_this<ServedCall> {
 public:
  // Called once, with the bytes of the reply's frame, by whoever brings the last outcome. Does not throw.
  using Answer = std::function<void(size_t bytes)>;

  // The reply goes to `reply`, which has `room` bytes; that memory outlives the answer. The frame must have begun
  // with `header`.
  ServedCall(std::shared_ptr<Handler> handler, const FrameHeader& header, char* reply, size_t room, Answer answer);
  // Does what the frame asks for. What cannot be read is answered with a refusal.
  void perform(const char* frame, size_t bytes);
  // Whether outcomes are still due.
  bool is_waiting();
  // Answers now; what has no outcome yet is StepPending.
  void answer_now();
  double seconds() const { return header_.seconds; }

 private:
  void perform_one(size_t index, Operation& operation);
  void settle(size_t index, Outcome outcome);
  void refuse(const Fault& fault);
  void write_answer();

  const std::shared_ptr<Handler> handler_;
  const FrameHeader header_;
  char* const reply_;
  const size_t room_;
  Answer answer_;
  ParsedRequest request_;
  std::vector<ReplyRows> rows_;
  ReplyLayout layout_;
  std::mutex mutex_;
  std::vector<std::optional<Outcome>> outcomes_;
  size_t num_due_ = 0;
  bool has_writes_ = false, is_answered_ = false;
};

}  // namespace geartrain
