#include "client/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>

#include "machine/fan_out.hpp"
#include "machine/pauses.hpp"

namespace geartrain {
namespace {

constexpr std::chrono::milliseconds kLookInterval{100}, kFirstPause{1}, kLongestPause{20};
// Below this, shards of this process are faster one after another than on threads of their own.
constexpr size_t kBesideBytes = size_t{1} << 20;

}  // namespace

// Receives the outcome of a write from an engine, at once or later.
class Settled {
 public:
  bool is_done() {
    const std::lock_guard lock(mutex_);
    return outcome_ && std::holds_alternative<Done>(*outcome_);
  }
  void set(const Outcome& outcome) {
    const std::lock_guard lock(mutex_);
    outcome_ = outcome;
    changed_.notify_all();
  }
  // Returns the outcome; none: `look` gave up.
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

namespace {

size_t bytes_of(const Operation& operation) {
  return std::visit([](const auto& one) { return static_cast<size_t>(one.count * one.dim) * item_bytes(one.dtype); },
                    operation.request);
}

// Writes the rows of a reply, and whether they exist, to the pull's memory.
void place(const PullRequest& pull, const ParsedReply& reply) {
  const size_t dim = static_cast<size_t>(pull.dim), row_bytes = dim * item_bytes(pull.dtype);
  if (pull.wire_dtype() == pull.dtype)
    copy_rows(pull.places(), reply.rows, pull.count, row_bytes);
  else
    widen_rows(pull.places(), reply.rows, pull.count, dim, pull.wire_dtype());
  if (pull.present == nullptr) return;
  for (int64_t i = 0; i < pull.count; ++i)
    pull.present[pull.positions == nullptr ? i : pull.positions[i]] = reply.present[i] != 0;
}

// Reads a reply that has arrived.
void take(Job& job) {
  const std::vector<ParsedReply> replies = job.call->replies();
  for (size_t i = 0; i < replies.size(); ++i) {
    const Done* done = std::get_if<Done>(&replies[i].outcome);
    if (done == nullptr) {
      job.outcomes[i] = std::get<Fault>(replies[i].outcome);
      continue;
    }
    if (job.follows_a_write(i) && !std::holds_alternative<Done>(job.outcomes[i - 1])) continue;  // rows of no write
    if (const auto* pull = std::get_if<PullRequest>(&job.operations[i].request)) place(*pull, replies[i]);
    job.outcomes[i] = *done;
  }
}

// Returns the outcome of a call that got no room in time: depends on whether the shard or this process is the cause.
PartOutcome outcome_of(const Full& full) {
  if (full.is_silent) return Late{};
  return Fault("Busy", "this process has too many calls in flight to the shard; retry", 0.1);
}

using WrittenRows = std::pair<const PreparedWrite*, const ShardPart*>;

// Returns the rows of a part, contiguous, if need be in `copy`; null: they stay where they are.
const char* rows_in_order(const Operation& operation, const WrittenRows& source, std::unique_ptr<char[]>& copy) {
  const auto& [prepared, part] = source;
  const auto* push = std::get_if<PushRequest>(&operation.request);
  const char* rows = prepared->rows_of(*part);
  const bool stay = push != nullptr && !push->group && prepared->row_bytes() >= kLongRowBytes;
  if (rows != nullptr || stay) return rows;
  copy.reset(new char[std::max<size_t>(1, static_cast<size_t>(part->count) * prepared->row_bytes())]);
  prepared->copy_rows_of(*part, copy.get());
  return copy.get();
}

// Starts a write, whose arrays are free when this returns; it may wait for other ranks.
std::shared_ptr<Settled> begun(Engine& engine, const Operation& operation, const WrittenRows& source,
                               const Caller& caller, PostPushRows* after) {
  const auto& [prepared, part] = source;
  const auto* push = std::get_if<PushRequest>(&operation.request);
  std::unique_ptr<char[]> copy;
  const char* rows = rows_in_order(operation, source, copy);
  auto settled = std::make_shared<Settled>();
  const Completion completion = [settled](const Outcome& outcome) { settled->set(outcome); };
  if (push != nullptr) {
    PushRequest whole = *push;
    whole.gradients = rows;
    whole.scattered = prepared->places_of(*part);
    engine.push(operation.context, operation.table, whole, true, completion, caller, after);
  } else {
    AssignRequest whole = std::get<AssignRequest>(operation.request);
    whole.rows = rows;
    engine.assign(operation.context, operation.table, whole, true, completion, caller);
  }
  return settled;
}

}  // namespace

Exchange::Exchange(std::vector<Job>& jobs, const View& view, const Attempt& attempt) : jobs_(jobs), attempt_(attempt) {
  for (Job& job : jobs_) {
    job.endpoint = &view.endpoints[static_cast<size_t>(job.shard)];
    job.outcomes.resize(job.operations.size());
    for (Operation& operation : job.operations) {
      operation.context.shard_incarnation = job.endpoint->incarnation;
      operation.context.cluster_version = view.cluster_version;
    }
  }
}

void Exchange::run() {
  for (Job& job : jobs_) {
    if (!job.endpoint->connection) continue;
    write_once_there_is_room(job);
    send(job);
  }
  perform_here();
  for (Job& job : jobs_) {
    if (job.call) receive(job, SteadyTime::max(), true);
    await_writes(job);
  }
}

bool Exchange::send(bool may_wait) {
  for (Job& job : jobs_) {
    if (!job.endpoint->connection) continue;
    try {
      write(job, may_wait);
    } catch (const Full& full) {
      for (Job& each : jobs_) each.call.reset();
      if (!may_wait) return false;
      for (Job& each : jobs_) each.end(outcome_of(full));  // nothing was sent
      return true;
    }
  }
  for (Job& job : jobs_) send(job);
  return true;
}

bool Exchange::receive_until(SteadyTime until) {
  for (Job& job : jobs_) {
    try {
      if (job.call && !receive(job, until, false)) return false;
    } catch (const std::exception&) {  // no memory: the connection is made again later
      job.end(NotConnected{});
      job.call.reset();
    }
  }
  return true;
}

std::vector<int64_t> Exchange::waiting() const {
  std::vector<int64_t> shards;
  for (const Job& job : jobs_)
    if (job.call) shards.push_back(job.shard);
  return shards;
}

// Waits for other calls to end; first for replies to earlier jobs, which hold some of the room.
void Exchange::write_once_there_is_room(Job& job) {
  auto next_look = std::chrono::steady_clock::now() + kLookInterval;
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    PartOutcome outcome;
    try {
      return write(job, true);
    } catch (const Full& full) {
      outcome = outcome_of(full);
    }
    for (Job& before : jobs_)
      if (before.call) receive(before, SteadyTime::max(), true);
    const auto now = std::chrono::steady_clock::now();
    if (now >= attempt_.deadline || (now >= next_look && attempt_.look && attempt_.look({&job.shard, 1})))
      return job.end(outcome);
    if (now >= next_look) next_look = now + kLookInterval;
    std::this_thread::sleep_for(pause);
  }
}

// Writes the frame of a job into its call. Throws Full.
void Exchange::write(Job& job, bool may_wait) const {
  try {
    job.call.emplace(*job.endpoint->connection, job.operations, attempt_.seconds, may_wait);
    for (size_t i = 0; i < job.rows.size(); ++i) {
      if (job.follows_a_write(i)) continue;
      const auto& [prepared, part] = job.rows[i];
      if (const char* rows = prepared->rows_of(*part)) job.call->attach(i, rows);
      else prepared->copy_rows_of(*part, job.call->rows(i));
    }
  } catch (const Lost&) {
    job.call.reset();
  } catch (const Refused&) {
    job.call.reset();
  } catch (const Fault& fault) {
    job.end(fault);
  }
}

// Sends the frame, if it was written.
void Exchange::send(Job& job) const {
  if (!job.call) return;
  try {
    job.call->send(attempt_.deadline, [this] { return look(); });
  } catch (const Full&) {
    job.end(Late{});
    job.call.reset();
  } catch (const Lost&) {
    job.call.reset();
  }
}

// Returns false if the reply did not come by `until`, and there is time left.
bool Exchange::receive(Job& job, SteadyTime until, bool may_spin) {
  try {
    if (!job.call->wait(std::min(until, attempt_.deadline), [this] { return look(); }, may_spin)) {
      if (until < attempt_.deadline && std::chrono::steady_clock::now() < attempt_.deadline) return false;
      job.end(Late{});
    } else {
      take(job);
    }
  } catch (const Lost&) {
    job.end(NotConnected{});
  } catch (const Fault& fault) {
    job.end(fault);
  }
  job.call.reset();
  return true;
}

void Exchange::perform_here() {
  std::vector<Job*> here;
  size_t bytes = 0;
  for (Job& job : jobs_) {
    if (!job.is_here()) continue;
    here.push_back(&job);
    for (const Operation& operation : job.operations) bytes += bytes_of(operation);
  }
  const auto cores = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  if (here.size() <= 1 || bytes < kBesideBytes) {
    for (Job* job : here) perform(*job, bytes < kBesideBytes ? 1 : cores, {.look = [this] { return look(); }});
    return;
  }
  const int64_t threads = std::max<int64_t>(1, cores / static_cast<int64_t>(here.size()));  // of each
  std::atomic<bool> has_left = false;
  std::exception_ptr error;
  std::mutex error_mutex;
  deal_out(static_cast<int64_t>(here.size()), cores,
           [&](int64_t piece, int64_t thread) {
             const auto caller_looks = [&] { return look() || has_left; };
             const auto helper_looks = [&] { return has_left.load(); };
             try {
               if (has_left) return;
               perform(
                   *here[static_cast<size_t>(piece)], threads,
                   {.has_left = &has_left, .look = thread == 0 ? Turn::Look(caller_looks) : Turn::Look(helper_looks)});
             } catch (...) {
               const std::lock_guard lock(error_mutex);
               if (!error) error = std::current_exception();
               has_left = true;
             }
           });
  if (error) std::rethrow_exception(error);
}

// Whether there are several operations, all small and of one kind.
template <class Request>
bool are_all(const Job& job) {
  return job.operations.size() > 1 && std::ranges::all_of(job.operations, [](const Operation& operation) {
           return std::holds_alternative<Request>(operation.request) && bytes_of(operation) <= kBlockBytes;
         });
}

// Pulls from several tables in parallel, in one turn; false: the operations are others.
bool Exchange::pull_beside(Job& job, int64_t threads, const Caller& caller) {
  if (threads == 1 || !are_all<PullRequest>(job)) return false;
  std::vector<Outcome> outcomes(job.operations.size());
  std::vector<Engine::TablePull> pulls;
  for (size_t i = 0; i < job.operations.size(); ++i) {
    const Operation& operation = job.operations[i];
    const auto& request = std::get<PullRequest>(operation.request);
    if (request.required_sync) return false;
    pulls.push_back({&operation.context, &operation.table, &request, &outcomes[i]});
  }
  job.endpoint->engine->pull_beside(pulls, threads, caller);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (const auto* fault = std::get_if<Fault>(&outcomes[i])) job.outcomes[i] = *fault;
    else job.outcomes[i] = std::get<Done>(outcomes[i]);
  }
  return true;
}

// Pushes to several tables in the same way.
bool Exchange::push_beside(Job& job, int64_t threads, const Caller& caller) {
  if (threads == 1 || !are_all<PushRequest>(job)) return false;
  const size_t count = job.operations.size();
  std::set<std::string_view> tables;
  for (size_t i = 0; i < count; ++i) {
    tables.insert(job.operations[i].table);
    if (std::get<PushRequest>(job.operations[i].request).group) return false;
  }
  if (tables.size() < count) return false;
  std::vector<std::unique_ptr<char[]>> copies(count);
  std::vector<Engine::TablePush> pushes;
  for (size_t i = 0; i < count; ++i) {
    const Operation& operation = job.operations[i];
    auto settled = std::make_shared<Settled>();
    PushRequest push = std::get<PushRequest>(operation.request);
    push.gradients = rows_in_order(operation, job.rows[i], copies[i]);
    push.scattered = job.rows[i].first->places_of(*job.rows[i].second);
    pushes.push_back({&operation.context, &operation.table, std::move(push),
                      [settled](const Outcome& outcome) { settled->set(outcome); }});
    job.settled.push_back(std::move(settled));
  }
  job.endpoint->engine->push_beside(pushes, threads, caller);
  return true;
}

void Exchange::perform(Job& job, int64_t threads, const Caller& caller) {
  if (pull_beside(job, threads, caller) || push_beside(job, threads, caller)) return;
  for (size_t i = 0; i < job.operations.size(); ++i) {
    const Operation& operation = job.operations[i];
    if (const auto* pull = std::get_if<PullRequest>(&operation.request)) {
      try {
        job.outcomes[i] = Done{.writes = job.endpoint->engine->pull(operation.context, operation.table, *pull, caller)};
      } catch (const Fault& fault) {
        job.outcomes[i] = fault;
      }
    } else {
      write_here(job, i, caller);
      i += job.follows_a_write(i + 1);
    }
  }
}

// Performs a write at an engine of this process, with the pull that follows, if one does.
void Exchange::write_here(Job& job, size_t at, const Caller& caller) {
  Engine& engine = *job.endpoint->engine;
  if (!job.follows_a_write(at + 1))
    return job.settled.push_back(begun(engine, job.operations[at], job.rows[at], caller, nullptr));
  const Operation& next = job.operations[at + 1];
  const auto& pull = std::get<PullRequest>(next.request);
  PostPushRows after{.rows = pull.places(), .dtype = pull.dtype};
  // Rows to be rounded are pulled separately.
  job.settled.push_back(begun(engine, job.operations[at], job.rows[at], caller, pull.wire ? nullptr : &after));
  job.settled.push_back(nullptr);
  if (after.writes == 0 && !job.settled[at]->is_done()) return;
  try {
    if (after.writes == 0) after.writes = engine.pull(next.context, next.table, pull, caller);
    job.outcomes[at + 1] = Done{.writes = after.writes};
  } catch (const Fault& fault) {
    job.outcomes[at + 1] = fault;
  }
}

// Called once all shards have started: ranks wait for each other at each of them.
void Exchange::await_writes(Job& job) const {
  for (size_t i = 0; i < job.settled.size(); ++i) {
    if (!job.settled[i]) continue;
    const std::optional<Outcome> outcome = job.settled[i]->wait([this] { return look(); });
    if (!outcome) job.outcomes[i] = Late{};
    else if (const auto* fault = std::get_if<Fault>(&*outcome)) job.outcomes[i] = *fault;
    else job.outcomes[i] = std::get<Done>(*outcome);
  }
}

}  // namespace geartrain
