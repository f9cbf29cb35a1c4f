// The calls of a client, cut by shard: what goes to each, and what all that comes to.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "client/exchange.hpp"
#include "client/prepared_write.hpp"

namespace geartrain {

struct UndonePart {
  int64_t shard;
  PartOutcome outcome;
};
using Undone = std::vector<UndonePart>;

// Those that a call is for; none: all that it concerns.
using Shards = std::span<const int64_t>;

// A pull. Ids that occur twice travel once.
class PullCall {
 public:
  // `request` has no positions: out is [count, dim]. The rows of shards that are not asked stay as they are. `are_distinct`: no id
  // occurs twice, which need not be looked at.
  PullCall(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, const Placement& placement,
           const View& view, Shards shards = {}, bool are_distinct = false);
  PullCall(const PullCall&) = delete;  // the jobs refer to what it holds
  PullCall& operator=(const PullCall&) = delete;

  std::vector<Job>& jobs() { return jobs_; }
  // Once all jobs have their outcomes: the writes that each shard had applied to the table; -1: it has brought no rows.
  std::vector<int64_t> writes() const;
  // The same: the shards that have not brought theirs to its end.
  Undone undone();

 private:
  void merge(const int64_t*& ids, int64_t& count);
  void repeat() const;

  const PullRequest request_;
  const int64_t num_shards_;
  std::vector<int64_t> distinct_, inverse_;
  std::vector<int64_t> firsts_;  // of each distinct id its first place; empty: all are distinct
  std::vector<int64_t> positions_;
  std::vector<bool> left_alone_;  // distinct ids of shards that are not asked; empty: there are none
  std::optional<CutIds> cut_;
  std::vector<Job> jobs_;
};

// Rows of distinct ids of one of several tables.
struct TablePull {
  const TableFacts* table;
  int64_t table_incarnation;
  PullRequest request;
};

// What one of several pulls has come to.
struct Pulled {
  Undone undone;
  std::vector<int64_t> writes;  // as PullCall::writes
};

// Pulls from several tables: one frame a shard for all of them.
class PullCalls {
 public:
  PullCalls(std::span<const TablePull> pulls, const Placement& placement, const View& view);

  std::vector<Job>& jobs() { return jobs_; }
  // Once all jobs have theirs: of each pull.
  std::vector<Pulled> pulled();

 private:
  std::list<PullCall> calls_;
  std::vector<Job> jobs_;
  std::vector<std::pair<size_t, size_t>> places_;  // of each job of each call: its job, and its operation there
};

struct Write {
  const PreparedWrite* prepared;
  CallContext context;
  std::vector<int64_t> shards;  // that it is for; none: all
  // If not null: where the rows of this push [count, dim] come as they are after it, shard by shard; without positions.
  const PullRequest* after = nullptr;
};
using WriteOutcomes = std::vector<std::vector<PartOutcome>>;

// Writes: one frame a shard for all of them.
class WriteCall {
 public:
  WriteCall(std::span<const Write> writes, const Placement& placement);

  std::vector<Job>& jobs() { return jobs_; }
  // Once all jobs have theirs: of each write, in the order of its parts that it is for.
  WriteOutcomes outcomes();
  // The writes that each shard had applied to the table when the rows of write `number` were read; none: not all of them have come.
  std::optional<std::vector<int64_t>> writes_after(size_t number) const;

 private:
  using Place = std::pair<size_t, size_t>;  // a job, and an operation there

  void add_pull(Job& job, const ShardPart& part, const Write& write) const;

  std::vector<Job> jobs_;
  std::vector<std::vector<Place>> pulls_;  // of parts with rows, if they are wanted
  std::vector<std::vector<Place>> places_;  // of each part
};

}  // namespace geartrain
