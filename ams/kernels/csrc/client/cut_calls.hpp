// Calls of a client, split by shard: the requests to each, and the merged outcome.
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

// Shards of a call; empty: all that its ids belong to.
using Shards = std::span<const int64_t>;

// A pull. Repeated ids are sent once.
class PullCall {
 public:
  // `request` has no positions: out is [count, dim]. Rows of other shards stay unchanged. `are_distinct`: no id occurs
  // twice, which is not checked.
  PullCall(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, const Placement& placement,
           const View& view, Shards shards = {}, bool are_distinct = false);
  PullCall(const PullCall&) = delete;  // jobs refer to its members
  PullCall& operator=(const PullCall&) = delete;

  std::vector<Job>& jobs() { return jobs_; }
  // Once all jobs have outcomes: the writes that each shard had applied to the table; -1: it returned no rows.
  std::vector<int64_t> writes() const;
  // Once all jobs have outcomes: the unfinished shards.
  Undone undone();

 private:
  void merge(const int64_t*& ids, int64_t& count);
  void repeat() const;

  const PullRequest request_;
  const int64_t num_shards_;
  std::vector<int64_t> distinct_, inverse_;
  std::vector<int64_t> firsts_;  // first place of each distinct id; empty: all ids are distinct
  std::vector<int64_t> positions_;
  std::vector<bool> left_alone_;  // distinct ids of shards without a request; empty: none
  std::optional<CutIds> cut_;
  std::vector<Job> jobs_;
};

// Rows of distinct ids of one of several tables.
struct TablePull {
  const TableFacts* table;
  int64_t table_incarnation;
  PullRequest request;
};

// Outcome of one of several pulls.
struct Pulled {
  Undone undone;
  std::vector<int64_t> writes;  // as PullCall::writes
};

// Pulls from several tables: one frame a shard for all of them.
class PullCalls {
 public:
  PullCalls(std::span<const TablePull> pulls, const Placement& placement, const View& view);

  std::vector<Job>& jobs() { return jobs_; }
  // Outcome of each pull, once all jobs have theirs.
  std::vector<Pulled> pulled();

 private:
  std::list<PullCall> calls_;
  std::vector<Job> jobs_;
  std::vector<std::pair<size_t, size_t>> places_;  // for each job of each call: joint job, and operation there
};

struct Write {
  const PreparedWrite* prepared;
  CallContext context;
  std::vector<int64_t> shards;  // shards to write to; empty: all
  // If not null: destination of the rows [count, dim] of this push after it, shard by shard; without positions.
  const PullRequest* after = nullptr;
};
using WriteOutcomes = std::vector<std::vector<PartOutcome>>;

// Writes: one frame a shard for all of them.
class WriteCall {
 public:
  WriteCall(std::span<const Write> writes, const Placement& placement);

  std::vector<Job>& jobs() { return jobs_; }
  // Outcomes of each write, once all jobs have theirs, in the order of its parts.
  WriteOutcomes outcomes();
  // Writes that each shard had applied to the table when the rows of write `number` were read; none: some rows are
  // missing.
  std::optional<std::vector<int64_t>> writes_after(size_t number) const;

 private:
  using Place = std::pair<size_t, size_t>;  // a job, and an operation there

  void add_pull(Job& job, const ShardPart& part, const Write& write) const;

  std::vector<Job> jobs_;
  std::vector<std::vector<Place>> pulls_;  // pulls of each part's rows, if they are wanted
  std::vector<std::vector<Place>> places_;  // of each write's parts
};

}  // namespace geartrain
