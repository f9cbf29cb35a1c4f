#include "client/cut_calls.hpp"

#include <algorithm>
#include <utility>

#include "frames/frame.hpp"
#include "routing/merge_route.hpp"

namespace geartrain {
namespace {

bool is_asked(Shards shards, int64_t shard) {
  return shards.empty() || std::ranges::find(shards, shard) != shards.end();
}

// Chooses the job that gets one more operation for a shard.
class JobOfShard {
 public:
  JobOfShard(std::vector<Job>& jobs, int64_t num_shards) : jobs_(jobs), places_(static_cast<size_t>(num_shards), -1) {}
  // Returns it, with room for `count` more operations.
  size_t operator()(int64_t shard, size_t count = 1) {
    int64_t& job = places_[static_cast<size_t>(shard)];
    if (job < 0 || jobs_[static_cast<size_t>(job)].operations.size() + count > kMaxOperations) {
      job = static_cast<int64_t>(jobs_.size());
      jobs_.emplace_back();
      jobs_.back().shard = shard;
    }
    return static_cast<size_t>(job);
  }

 private:
  std::vector<Job>& jobs_;
  std::vector<int64_t> places_;
};

}  // namespace

PullCall::PullCall(const TableFacts& table, int64_t table_incarnation, const PullRequest& request,
                   const Placement& placement, const View& view, Shards shards, bool are_distinct)
    : request_(request), num_shards_(placement.num_shards) {
  const int64_t* ids = request.ids;
  int64_t count = request.count;
  if (view.has_connections && !are_distinct) merge(ids, count);
  const bool is_merged = !firsts_.empty(), is_whole = placement.num_shards == 1;
  cut_.emplace(ids, count, placement, table.is_dense, false);
  if (is_merged && !is_whole) {
    positions_.reserve(firsts_.size());
    for (const ShardPart& part : cut_->parts())
      for (int64_t i = 0; i < part.count; ++i) positions_.push_back(firsts_[static_cast<size_t>(part.places[i])]);
  }
  jobs_.reserve(cut_->parts().size());
  int64_t begin = 0;
  for (const ShardPart& part : cut_->parts()) {
    const int64_t first = std::exchange(begin, begin + part.count);
    if (!is_asked(shards, part.shard)) {
      left_alone_.resize(firsts_.size());
      for (int64_t i = 0; is_merged && i < part.count; ++i) left_alone_[static_cast<size_t>(part.places[i])] = true;
      continue;
    }
    PullRequest own = request;
    own.ids = part.ids;
    own.count = part.count;
    own.size = request.count;
    own.positions = !is_merged ? part.places : is_whole ? firsts_.data() : positions_.data() + first;
    Operation operation{{}, table.name, std::move(own)};
    operation.context.table_incarnation = table_incarnation;
    Job& job = jobs_.emplace_back();
    job.shard = part.shard;
    job.operations.push_back(std::move(operation));
  }
}

std::vector<int64_t> PullCall::writes() const {
  std::vector<int64_t> writes(static_cast<size_t>(num_shards_), -1);
  for (const Job& job : jobs_)
    if (const Done* done = std::get_if<Done>(&job.outcomes.front()))
      writes[static_cast<size_t>(job.shard)] = done->writes;
  return writes;
}

Undone PullCall::undone() {
  if (!firsts_.empty()) repeat();
  Undone undone;
  for (Job& job : jobs_)
    if (!std::holds_alternative<Done>(job.outcomes.front()))
      undone.push_back({job.shard, std::move(job.outcomes.front())});
  return undone;
}

void PullCall::merge(const int64_t*& ids, int64_t& count) {
  if (is_rising(ids, count)) return;
  distinct_.resize(static_cast<size_t>(count));
  inverse_.resize(static_cast<size_t>(count));
  const int64_t num_distinct = merge_ids(ids, count, distinct_.data(), inverse_.data());
  if (num_distinct == count) return;
  firsts_.reserve(static_cast<size_t>(num_distinct));
  for (int64_t i = 0; i < count; ++i)
    if (inverse_[static_cast<size_t>(i)] == static_cast<int64_t>(firsts_.size())) firsts_.push_back(i);
  ids = distinct_.data();
  count = num_distinct;
}

void PullCall::repeat() const {
  const size_t row_bytes = static_cast<size_t>(request_.dim) * item_bytes(request_.dtype);
  for (int64_t i = 0; i < request_.count; ++i) {
    const auto distinct = static_cast<size_t>(inverse_[static_cast<size_t>(i)]);
    const int64_t from = firsts_[distinct];
    if (from == i || (!left_alone_.empty() && left_alone_[distinct])) continue;
    copy_row(request_.places().at(i, row_bytes), request_.places().at(from, row_bytes), row_bytes);
    if (request_.present != nullptr) request_.present[i] = request_.present[from];
  }
}

PullCalls::PullCalls(std::span<const TablePull> pulls, const Placement& placement, const View& view) {
  JobOfShard job_of_shard(jobs_, placement.num_shards);
  for (const TablePull& pull : pulls) {
    PullCall& call =
        calls_.emplace_back(*pull.table, pull.table_incarnation, pull.request, placement, view, Shards(), true);
    for (Job& own : call.jobs()) {
      const size_t job = job_of_shard(own.shard);
      places_.emplace_back(job, jobs_[job].operations.size());
      jobs_[job].operations.push_back(std::move(own.operations.front()));
    }
  }
}

std::vector<Pulled> PullCalls::pulled() {
  std::vector<Pulled> all;
  auto place = places_.begin();
  for (PullCall& call : calls_) {
    for (Job& own : call.jobs()) {
      own.outcomes.assign(1, std::move(jobs_[place->first].outcomes[place->second]));
      ++place;
    }
    std::vector<int64_t> writes = call.writes();
    all.push_back({call.undone(), std::move(writes)});
  }
  return all;
}

WriteCall::WriteCall(std::span<const Write> writes, const Placement& placement)
    : pulls_(writes.size()), places_(writes.size()) {
  JobOfShard job_of_shard(jobs_, placement.num_shards);
  for (size_t number = 0; number < writes.size(); ++number) {
    const std::span<const ShardPart> parts = writes[number].prepared->parts();
    const bool is_for_all = writes[number].shards.size() == parts.size();
    for (const ShardPart& part : parts) {
      if (!is_for_all && !is_asked(writes[number].shards, part.shard)) continue;
      const size_t job = job_of_shard(part.shard, writes[number].after == nullptr ? 1 : 2);
      Job& own = jobs_[job];
      places_[number].emplace_back(job, own.operations.size());
      own.operations.push_back(writes[number].prepared->operation(part, writes[number].context));
      own.rows.emplace_back(writes[number].prepared, &part);
      if (writes[number].after == nullptr || part.count == 0) continue;
      pulls_[number].emplace_back(job, own.operations.size());
      add_pull(own, part, writes[number]);
    }
  }
}

void WriteCall::add_pull(Job& job, const ShardPart& part, const Write& write) const {
  PullRequest pull = *write.after;
  pull.ids = part.ids;
  pull.count = part.count;
  pull.size = write.after->count;
  pull.positions = part.places;
  Operation operation{{}, job.operations.back().table, std::move(pull)};
  operation.context.table_incarnation = write.context.table_incarnation;
  job.operations.push_back(std::move(operation));
  job.rows.emplace_back(nullptr, nullptr);
}

std::optional<std::vector<int64_t>> WriteCall::writes_after(size_t number) const {
  std::vector<int64_t> writes;
  for (const auto& [job, operation] : pulls_[number]) {
    const Done* done = std::get_if<Done>(&jobs_[job].outcomes[operation]);
    if (done == nullptr) return std::nullopt;
    writes.push_back(done->writes);
  }
  return writes;
}

WriteOutcomes WriteCall::outcomes() {
  WriteOutcomes outcomes(places_.size());
  for (size_t number = 0; number < places_.size(); ++number)
    for (const auto& [job, operation] : places_[number])
      outcomes[number].push_back(std::move(jobs_[job].outcomes[operation]));
  return outcomes;
}

}  // namespace geartrain
