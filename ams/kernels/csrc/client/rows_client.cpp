#include "client/rows_client.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "client/frame_call.hpp"
#include "machine/fan_out.hpp"
#include "routing/merge_route.hpp"

namespace geartrain {
namespace {

constexpr std::chrono::milliseconds kLookInterval{100};
// Below this, shards of this process are faster one after the other than on threads of their own.
constexpr size_t kBesideBytes = size_t{1} << 20;

// Where an engine puts the outcome of a write, at once or later.
class Settled {
 public:
  void set(const Outcome& outcome) {
    const std::lock_guard lock(mutex_);
    outcome_ = outcome;
    changed_.notify_all();
  }
  // None: `look` gave up.
  template <class Look>
  std::optional<Outcome> wait(const Look& look) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, kLookInterval, [this] { return outcome_.has_value(); })) {
      lock.unlock();
      if (look()) return std::nullopt;
      lock.lock();
    }
    return outcome_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Outcome> outcome_;
};

size_t bytes_of(const Operation& operation) {
  return std::visit([](const auto& one) { return static_cast<size_t>(one.count * one.dim) * item_bytes(one.dtype); }, operation.request);
}

// Writes the rows of a reply, and which exist, to where the pull wants them.
void place(const PullRequest& pull, const ParsedReply& reply) {
  const size_t row_bytes = static_cast<size_t>(pull.dim) * item_bytes(pull.dtype);
  if (pull.positions == nullptr) {
    if (pull.count != 0) std::memcpy(pull.rows, reply.rows, static_cast<size_t>(pull.count) * row_bytes);
  } else {
    const char* from = reply.rows;
    for (int64_t i = 0; i < pull.count; ++i, from += row_bytes) {
      if (i + kRowsAhead < pull.count) prefetch_bytes(pull.rows + static_cast<size_t>(pull.positions[i + kRowsAhead]) * row_bytes, row_bytes);
      copy_row(pull.rows + static_cast<size_t>(pull.positions[i]) * row_bytes, from, row_bytes);
    }
  }
  if (pull.present == nullptr) return;
  for (int64_t i = 0; i < pull.count; ++i) pull.present[pull.positions == nullptr ? i : pull.positions[i]] = reply.present[i] != 0;
}

}  // namespace

// What goes to one shard in one call.
struct RowsClient::Job {
  int64_t shard = 0;
  const Way* way = nullptr;
  std::vector<Operation> operations;
  std::vector<std::pair<const PreparedWrite*, const ShardPart*>> rows;  // of writes
  std::vector<PartOutcome> outcomes;
  std::optional<FrameCall> call;                   // of a shard behind a connection
  std::vector<std::shared_ptr<Settled>> settled;  // of writes to an engine

  void end(const PartOutcome& outcome) { outcomes.assign(operations.size(), outcome); }
  bool is_here() const { return way->engine != nullptr; }
  size_t bytes() const {
    size_t sum = 0;
    for (const Operation& operation : operations) sum += bytes_of(operation);
    return sum;
  }
};

// One attempt: all jobs side by side.
class RowsClient::Exchange {
 public:
  Exchange(std::vector<Job>& jobs, const View& view, const Attempt& attempt) : jobs_(jobs), attempt_(attempt) {
    for (Job& job : jobs_) {
      job.way = &view.ways[static_cast<size_t>(job.shard)];
      job.outcomes.resize(job.operations.size());
      for (Operation& operation : job.operations) {
        operation.context.shard_incarnation = job.way->incarnation;
        operation.context.cluster_version = view.cluster_version;
      }
    }
  }

  void run() {
    for (Job& job : jobs_)
      if (job.way->connection) send(job);
    perform_here();
    for (Job& job : jobs_) {
      if (job.call) receive(job);
      await_writes(job);
    }
  }

 private:
  // The shards that have not replied.
  std::vector<int64_t> waiting() const {
    std::vector<int64_t> shards;
    for (const Job& job : jobs_)
      if (job.call) shards.push_back(job.shard);
    return shards;
  }
  bool look() const { return attempt_.look && attempt_.look(waiting()); }

  void send(Job& job) const {
    try {
      job.call.emplace(*job.way->connection, job.operations, attempt_.seconds);
      for (size_t i = 0; i < job.rows.size(); ++i) job.rows[i].first->copy_rows_of(*job.rows[i].second, job.call->rows(i));
      job.call->send(attempt_.deadline, [this] { return look(); });
    } catch (const Full&) {
      job.call.reset();
    } catch (const Lost&) {
      job.call.reset();
    } catch (const Fault& fault) {
      job.end(fault);
    }
  }

  void receive(Job& job) {
    try {
      if (!job.call->wait(attempt_.deadline, [this] { return look(); })) {
        job.end(Late{});
      } else {
        take(job);
      }
    } catch (const Lost&) {
      job.end(NoWay{});
    } catch (const Fault& fault) {
      job.end(fault);
    }
    job.call.reset();
  }

  static void take(Job& job) {
    const std::vector<ParsedReply> replies = job.call->replies();
    for (size_t i = 0; i < replies.size(); ++i) {
      const Done* done = std::get_if<Done>(&replies[i].outcome);
      if (done == nullptr) {
        job.outcomes[i] = std::get<Fault>(replies[i].outcome);
        continue;
      }
      if (const auto* pull = std::get_if<PullRequest>(&job.operations[i].request)) place(*pull, replies[i]);
      job.outcomes[i] = *done;
    }
  }

  void perform_here() {
    std::vector<Job*> here;
    size_t bytes = 0;
    for (Job& job : jobs_) {
      if (!job.is_here()) continue;
      here.push_back(&job);
      bytes += job.bytes();
    }
    if (here.size() <= 1 || bytes < kBesideBytes) {
      for (Job* job : here) perform(*job, {.look = [this] { return look(); }});
      return;
    }
    std::atomic<bool> has_left = false;
    std::exception_ptr error;
    std::mutex error_mutex;
    deal_out(static_cast<int64_t>(here.size()), static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency())),
             [&](int64_t piece, int64_t thread) {
               const auto caller_looks = [&] { return look() || has_left; };
               const auto helper_looks = [&] { return has_left.load(); };
               try {
                 if (has_left) return;
                 perform(*here[static_cast<size_t>(piece)],
                         {.has_left = &has_left, .look = thread == 0 ? Turn::Look(caller_looks) : Turn::Look(helper_looks)});
               } catch (...) {
                 const std::lock_guard lock(error_mutex);
                 if (!error) error = std::current_exception();
                 has_left = true;
               }
             });
    if (error) std::rethrow_exception(error);
  }

  static void perform(Job& job, const Caller& caller) {
    for (size_t i = 0; i < job.operations.size(); ++i) {
      const Operation& operation = job.operations[i];
      if (const auto* pull = std::get_if<PullRequest>(&operation.request)) {
        try {
          job.way->engine->pull(operation.context, operation.table, *pull, caller);
          job.outcomes[i] = Done{};
        } catch (const Fault& fault) {
          job.outcomes[i] = fault;
        }
      } else {
        job.settled.push_back(begun(*job.way->engine, operation, job.rows[i], caller));
      }
    }
  }

  // Begins a write, whose arrays are free when this returns; it may wait for other ranks.
  static std::shared_ptr<Settled> begun(Engine& engine, const Operation& operation,
                                        const std::pair<const PreparedWrite*, const ShardPart*>& source, const Caller& caller) {
    const auto& [prepared, part] = source;
    const char* rows = prepared->rows_of(*part);
    std::unique_ptr<char[]> copy;
    if (rows == nullptr) {
      copy.reset(new char[std::max<size_t>(1, static_cast<size_t>(part->count) * prepared->row_bytes())]);
      prepared->copy_rows_of(*part, copy.get());
      rows = copy.get();
    }
    auto settled = std::make_shared<Settled>();
    const Completion completion = [settled](const Outcome& outcome) { settled->set(outcome); };
    if (const auto* push = std::get_if<PushRequest>(&operation.request)) {
      PushRequest whole = *push;
      whole.gradients = rows;
      engine.push(operation.context, operation.table, whole, true, completion, caller);
    } else {
      AssignRequest whole = std::get<AssignRequest>(operation.request);
      whole.rows = rows;
      engine.assign(operation.context, operation.table, whole, true, completion, caller);
    }
    return settled;
  }

  // Once all shards have begun: ranks wait for each other at each of them.
  void await_writes(Job& job) const {
    for (size_t i = 0; i < job.settled.size(); ++i) {
      const std::optional<Outcome> outcome = job.settled[i]->wait([this] { return look(); });
      if (!outcome) job.outcomes[i] = Late{};
      else if (const auto* fault = std::get_if<Fault>(&*outcome)) job.outcomes[i] = *fault;
      else job.outcomes[i] = std::get<Done>(*outcome);
    }
  }

  std::vector<Job>& jobs_;
  const Attempt& attempt_;
};

RowsClient::RowsClient(Placement placement) : placement_(std::move(placement)) {
  auto view = std::make_shared<View>();
  view->ways.resize(static_cast<size_t>(placement_.num_shards));
  view_ = std::move(view);
}

std::shared_ptr<const RowsClient::View> RowsClient::view() const {
  const std::lock_guard lock(mutex_);
  return view_;
}

template <class Change>
void RowsClient::change(const Change& change) {
  std::shared_ptr<const View> before;  // its ways may end with it, which is not to be under the lock
  const std::lock_guard lock(mutex_);
  auto view = std::make_shared<View>(*view_);
  change(*view);
  view->has_connections = std::ranges::any_of(view->ways, [](const Way& way) { return way.connection != nullptr; });
  before = std::exchange(view_, std::move(view));
}

void RowsClient::set_way(int64_t shard, int64_t incarnation, std::shared_ptr<Engine> engine, std::shared_ptr<Connection> connection) {
  change([&](View& view) { view.ways.at(static_cast<size_t>(shard)) = {incarnation, std::move(engine), std::move(connection)}; });
}

void RowsClient::set_cluster_version(int64_t version) {
  change([&](View& view) { view.cluster_version = version; });
}

std::vector<RowsClient::Part> RowsClient::pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request,
                                               const Attempt& attempt) {
  const std::shared_ptr<const View> view = this->view();
  const int64_t *ids = request.ids, *firsts = nullptr;
  int64_t count = request.count;
  std::vector<int64_t> distinct, inverse, first_places;
  if (view->has_connections && !is_rising(ids, count)) {
    distinct.resize(static_cast<size_t>(count));
    inverse.resize(static_cast<size_t>(count));
    const int64_t num_distinct = merge_ids(ids, count, distinct.data(), inverse.data());
    if (num_distinct < count) {
      first_places.reserve(static_cast<size_t>(num_distinct));
      for (int64_t i = 0; i < count; ++i)
        if (inverse[static_cast<size_t>(i)] == static_cast<int64_t>(first_places.size())) first_places.push_back(i);
      ids = distinct.data();
      firsts = first_places.data();
      count = num_distinct;
    }
  }
  const CutIds cut(ids, count, placement_, table.is_dense, false);
  std::vector<int64_t> positions;
  const bool is_whole = placement_.num_shards == 1;
  if (firsts != nullptr && !is_whole) {
    positions.reserve(static_cast<size_t>(count));
    for (const ShardPart& part : cut.parts())
      for (int64_t i = 0; i < part.count; ++i) positions.push_back(firsts[part.places[i]]);
  }
  std::vector<Job> jobs(cut.parts().size());
  int64_t begin = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const ShardPart& part = cut.parts()[i];
    PullRequest own = request;
    own.ids = part.ids;
    own.count = part.count;
    own.size = request.count;
    own.positions = firsts == nullptr ? part.places : is_whole ? firsts : positions.data() + begin;
    begin += part.count;
    Operation operation{{}, table.name, std::move(own)};
    operation.context.table_incarnation = table_incarnation;
    jobs[i].shard = part.shard;
    jobs[i].operations.push_back(std::move(operation));
  }
  Exchange(jobs, *view, attempt).run();
  if (firsts != nullptr) {
    const size_t row_bytes = static_cast<size_t>(request.dim) * item_bytes(request.dtype);
    for (int64_t i = 0; i < request.count; ++i) {
      const int64_t from = firsts[inverse[static_cast<size_t>(i)]];
      if (from == i) continue;
      copy_row(request.rows + static_cast<size_t>(i) * row_bytes, request.rows + static_cast<size_t>(from) * row_bytes, row_bytes);
      if (request.present != nullptr) request.present[i] = request.present[from];
    }
  }
  std::vector<Part> undone;
  for (Job& job : jobs)
    if (!std::holds_alternative<Done>(job.outcomes.front())) undone.push_back({job.shard, std::move(job.outcomes.front())});
  return undone;
}

std::vector<std::vector<PartOutcome>> RowsClient::write(std::span<const Write> writes, const Attempt& attempt) {
  const std::shared_ptr<const View> view = this->view();
  std::vector<Job> jobs;
  std::vector<int64_t> job_of_shard(static_cast<size_t>(placement_.num_shards), -1);
  std::vector<std::vector<std::pair<size_t, size_t>>> places(writes.size());  // of each part: its job, and its operation there
  for (size_t number = 0; number < writes.size(); ++number) {
    for (const ShardPart& part : writes[number].prepared->parts()) {
      int64_t& job = job_of_shard[static_cast<size_t>(part.shard)];
      if (job < 0 || jobs[static_cast<size_t>(job)].operations.size() == kMostOperations) {
        job = static_cast<int64_t>(jobs.size());
        jobs.emplace_back();
        jobs.back().shard = part.shard;
      }
      Job& own = jobs[static_cast<size_t>(job)];
      places[number].emplace_back(static_cast<size_t>(job), own.operations.size());
      own.operations.push_back(writes[number].prepared->operation(part, writes[number].context));
      own.rows.emplace_back(writes[number].prepared, &part);
    }
  }
  Exchange(jobs, *view, attempt).run();
  std::vector<std::vector<PartOutcome>> outcomes(writes.size());
  for (size_t number = 0; number < writes.size(); ++number)
    for (const auto& [job, operation] : places[number]) outcomes[number].push_back(std::move(jobs[job].outcomes[operation]));
  return outcomes;
}

}  // namespace geartrain
