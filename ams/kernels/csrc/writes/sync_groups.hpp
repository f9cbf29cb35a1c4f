// Synchronous writes: a shard gathers one part per rank, and applies them once, as one worker with the joint batch
// would.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "writes/rank_write.hpp"
#include "writes/recency_map.hpp"

namespace geartrain {

inline constexpr int64_t kMaxWorldSize = 65'536;
// Groups whose step a shard keeps: the last that pushed. A forgotten one is refused, as long as its name is known.
inline constexpr size_t kMaxGroups = 4096;
// Least memory limit of waiting parts: a server with more memory for rows gives them an eighth of that. The step that
// has waited longest may use as much again, so that it ends.
inline constexpr size_t kMinWaitingBytes = size_t{1} << 30;

// Step of a group, as snapshots store it.
struct GroupStep {
  std::string table;
  std::string job;
  int64_t world_size = 0;
  int64_t next_sequence = 0;
};

// A dropped part, and the error of its write.
struct RefusedPart {
  CallContext context;
  Fault fault;
};

// Sync groups of one shard. Used by the thread with the shard's turn; needs no interpreter lock, except for hosted
// writes.
class SyncGroups {
 public:
  // One rank's part, and its waiting caller.
  struct Part {
    CallContext context;
    RankWrite write;
    Fingerprint fingerprint;
    size_t bytes = 0;
    std::shared_ptr<const void> room = {};  // reserved memory of a waiting part
  };
  using Parts = std::map<int64_t, Part>;  // by rank
  struct Group {
    std::string table, job;
    int64_t world_size = 0;
    int64_t next_sequence = 0;
    double deadline = 0;
    std::string stream = {};  // stream that joined last
    int64_t incarnation = 0;
    Parts waiting = {};
    // Each rank's part of the last step; no entry for a rank that has not joined since a restore, an empty one for a
    // rank that joined first in the current step. `complete` writes here: every waiting rank has an entry.
    std::map<int64_t, std::optional<Fingerprint>> applied = {};
  };
  using Groups = RecencyMap<Group>;
  struct Joined {
    Groups::Entry* complete = nullptr;    // the group, held, if the parts of all ranks are there
    std::optional<RefusedPart> replaced;  // waiting part of the same rank, which this one replaced
  };

  // `max_waiting_bytes`: memory limit of waiting parts; 0: by the memory limit of the process's rows.
  explicit SyncGroups(double timeout_seconds, Clock clock = monotonic_seconds, size_t max_groups = kMaxGroups,
                      size_t max_waiting_bytes = 0);

  // Whether the group's write was applied before: this part is a rank's retry of it. Throws the Fault StepMismatch if
  // the rank is not at its group's step, or writes other data than before, InvalidArgument if it cannot belong to the
  // group.
  bool is_applied(const std::string& table, const RankWrite& write);
  // Adds one rank's part. It is copied unless it is the last one, whose caller calls `complete` or `abandon` before its
  // arrays go. Throws the Fault StepMismatch if the ranks disagree, Busy if there is no room for another waiting part,
  // MessageTooLarge if there would be none without the other groups: the waiting parts stay.
  Joined join(const CallContext& context, const std::string& table, const RankWrite& write);
  // Group of `member`, created at its step if it is new. Throws as `is_applied`.
  Groups::Entry& group(const std::string& table, const SyncGroup& member);
  // Waiting parts of all ranks, in rank order. The pointers are valid until `complete` or `abandon`.
  static std::vector<const RankWrite*> parts(const Groups::Entry& entry);
  // Records the joint write as applied: the group is at its next step. Returns the parts, for their callers. Allocates
  // nothing: the rows have changed, and an unrecorded step would be applied again.
  Parts complete(Groups::Entry& entry) noexcept;
  // Records the joint write as refused: forgets its parts, and returns them.
  Parts abandon(Groups::Entry& entry) noexcept;
  // Throws the Fault StepMismatch unless exactly the writes before `member.sequence` are applied.
  void require_step(const std::string& table, const SyncGroup& member);

  // Drops the parts of the streams of `job` with a lower incarnation. With `forget` also forgets the steps of their
  // groups, so that the next incarnation starts at its own.
  std::vector<RefusedPart> fence(const std::string& job, int64_t incarnation, bool forget);
  // Forgets the groups of a table; returns the callers that waited.
  std::vector<CallContext> drop_table(const std::string& table);

  std::vector<GroupStep> steps() const;
  // Lets a group continue at `step`, unless it has begun already, or the step is out of range.
  void restore(const GroupStep& step);

  // Deadline of the first incomplete group, on the clock; none if none waits.
  std::optional<double> next_deadline();
  // Drops the parts of overdue groups.
  std::vector<RefusedPart> expire();

 private:
  Groups::Entry& begin(Group group);
  Fault missing(const Group& group) const;
  std::shared_ptr<const void> room_of(size_t bytes, const Group& group, int64_t rank);

  const double timeout_seconds_;
  const Clock clock_;
  const size_t max_groups_, max_waiting_bytes_;
  std::shared_ptr<size_t> waiting_bytes_ = std::make_shared<size_t>(0);
  Groups groups_;     // held: those with a waiting caller, in the order of their deadlines
  Groups forgotten_;  // without their applied parts
};

}  // namespace geartrain
