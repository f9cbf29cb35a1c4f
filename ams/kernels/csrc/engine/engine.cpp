#include "engine/engine.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/text.hpp"
#include "calls/fault.hpp"
#include "machine/fan_out.hpp"
#include "machine/pauses.hpp"
#include "base/failpoint.hpp"
#include "routing/merge_route.hpp"

namespace geartrain {
namespace {

constexpr double kAtOnce = 0;  // a deadline that has passed on any alarm's clock

size_t bytes_of(int64_t count, int64_t dim, DType dtype) {
  return static_cast<size_t>(count) * static_cast<size_t>(dim) * item_bytes(dtype);
}

// Serves other callers between the blocks of a large request.
class BlockPauses final : public Pauses {
 public:
  // `turn`: this thread has it; null: it does not.
  BlockPauses(Turn* turn, OtherCallers* others) : turn_(turn), others_(others) {}
  // Null for a request of so few bytes of rows that it is one block.
  Pauses* of(size_t bytes) { return bytes > kBlockBytes ? this : nullptr; }

  bool are_wanted() override {
    if ((turn_ == nullptr || !turn_->has_readers()) && (others_ == nullptr || !others_->is_asked())) return false;
    return Clock::now() - began_ >= 2 * paused_;
  }
  void pause() noexcept override {
    const auto began = Clock::now();
    if (others_ != nullptr) others_->serve_pulls(turn_ != nullptr);
    if (turn_ != nullptr) turn_->let_readers_in();
    paused_ += Clock::now() - began;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Turn* const turn_;
  OtherCallers* const others_;
  const Clock::time_point began_ = Clock::now();
  Clock::duration paused_{0};
};

// Push with equal ids merged: sums of their gradients, in the caller's order.
struct MergedPush {
  PushRequest push;
  std::vector<int64_t> ids;
  std::vector<float> sums;
  std::vector<uint32_t> occurrences;
};

int64_t distinct_ids(const int64_t* ids, int64_t count, std::vector<int64_t>& distinct, std::vector<int64_t>& places,
                     Pauses* pauses) {
  distinct.resize(static_cast<size_t>(count));
  places.resize(static_cast<size_t>(count));
  return merge_ids(ids, count, distinct.data(), places.data(), pauses);
}

int64_t count_distinct(const AssignRequest& assign, OtherCallers* others) {
  if (is_rising(assign.ids, assign.count)) return assign.count;
  std::vector<int64_t> distinct, places;
  BlockPauses between_blocks(nullptr, others);
  return distinct_ids(assign.ids, assign.count, distinct, places,
                      between_blocks.of(bytes_of(assign.count, assign.dim, assign.dtype)));
}

void merge_equal_ids(MergedPush& merged, OtherCallers* others) {
  PushRequest& push = merged.push;
  if (is_rising(push.ids, push.count)) return;
  std::vector<int64_t> places;
  BlockPauses between_blocks(nullptr, others);
  Pauses* const pauses = between_blocks.of(bytes_of(push.count, push.dim, push.dtype));
  const int64_t count = distinct_ids(push.ids, push.count, merged.ids, places, pauses);
  if (count == push.count) return;
  merged.sums.resize(static_cast<size_t>(count * push.dim));
  sum_rows(push.gradients, push.dtype, places.data(), push.count, push.dim, count, merged.sums.data());
  push.ids = merged.ids.data();
  push.count = count;
  push.gradients = reinterpret_cast<const char*>(merged.sums.data());
  push.dtype = DType::float32;
  merged.occurrences.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < places.size(); ++i)
    add_occurrences(merged.occurrences[static_cast<size_t>(places[i])],
                    push.batch.occurrences_of(static_cast<int64_t>(i)));
  push.batch.occurrences = merged.occurrences.data();
}

}  // namespace

// Holds the turn from when it is acquired to the end of this object. Throws Fault("ShardUnavailable"), and what the
// caller's look throws.
class Engine::Holding {
 public:
  Holding(Engine& engine, const Caller& caller, Turn::Use use = Turn::Use::anything) {
    if (!caller.has_turn) wait(engine, caller, use);
    if (const Fault* failure = engine.failure_) throw *failure;
    if (engine.has_ended_) throw shut_down(engine);
    if (caller.has_left != nullptr && *caller.has_left) throw gone();
  }

 private:
  static Fault shut_down(const Engine& engine) { return {"ShardUnavailable", engine.name_ + " is shut down"}; }
  static Fault gone() { return {"ShardUnavailable", "the caller stopped waiting"}; }

  void wait(Engine& engine, const Caller& caller, Turn::Use use) {
    if (engine.is_closed_) throw shut_down(engine);
    place_.emplace(engine.turn_, use);
    if (!place_->wait(caller.look)) throw gone();
  }

  std::optional<Turn::Place> place_;
};

Engine::Engine(int64_t shard, int64_t incarnation, int64_t cluster_version, std::shared_ptr<Lease> lease,
               std::shared_ptr<CompletedWrites> completed_writes, std::shared_ptr<SyncGroups> groups)
    : shard_(shard),
      incarnation_(incarnation),
      name_("shard " + std::to_string(shard)),
      cluster_version_(cluster_version),
      lease_(std::move(lease)),
      completed_writes_(std::move(completed_writes)),
      groups_(std::move(groups)) {}

// The first reason stays: another thread may be reading it.
void Engine::fail(std::string reason) {
  if (failure_ != nullptr) return;
  kept_failure_ = std::make_unique<const Fault>("InternalError", std::move(reason));
  failure_ = kept_failure_.get();
}

void Engine::check_fence(int64_t shard_incarnation, int64_t cluster_version) {
  check_lease();
  if (shard_incarnation != 0 && shard_incarnation != incarnation_)
    throw Fault("ShardRestarted",
                name_ + " was restarted (its incarnation is " + std::to_string(incarnation_) + ", the call's is " +
                    std::to_string(shard_incarnation) +
                    "): the rows in its memory are lost; reconnect and restore a snapshot, or start the job again");
  // A caller with a later version knows of another shard, or of an altered table, before this shard does.
  if (const int64_t own = cluster_version_; cluster_version != 0 && cluster_version < own)
    throw Fault("StaleCluster", "the call has cluster version " + std::to_string(cluster_version) + ", " + name_ +
                                    " has " + std::to_string(own) + "; get the current one from the scheduler");
}

int64_t Engine::pull(const CallContext& context, const std::string& table, const PullRequest& request,
                     const Caller& caller) {
  const size_t bytes = bytes_of(request.count, request.dim, request.dtype);
  const bool is_brief = bytes <= kBlockBytes && !request.required_sync;
  const Holding holding(*this, caller, is_brief ? Turn::Use::brief_reading : Turn::Use::anything);
  try {
    check_fence(context.shard_incarnation, context.cluster_version);
    ServedTable& found = find(table);
    found.require_open(context.table_incarnation);
    if (request.required_sync) groups_->require_step(table, *request.required_sync);
    found.pull(request, BlockPauses(&turn_, caller.others).of(bytes));
    return found.all_writes();
  } catch (const std::exception&) {
    throw fault_in_flight(name_);
  }
}

// Returns the table of a new write, which `applied` or `failed` must complete; null: the write was completed before, or
// joined one in flight.
ServedTable* Engine::admitted(const CallContext& context, const std::string& name, const Completion& completion) {
  try {
    check_fence(context.shard_incarnation, context.cluster_version);
    // Refused even as a repetition: the rows of the write that it repeats are gone.
    if (const ServedTable* present = find_or_null(name)) present->require_open(context.table_incarnation);
    if (!completed_writes_->admit(context, completion)) return nullptr;
  } catch (const std::exception&) {
    completion(fault_in_flight(name_));
    return nullptr;
  }
  try {
    ServedTable& table = find(name);
    failpoint("shard.apply.before");
    return &table;
  } catch (const std::exception&) {
    completed_writes_->failed(context, fault_in_flight(name_));
    return nullptr;
  }
}

// Calls write(table), which returns an empty value if the write is completed already, or by others later.
template <class Write>
void Engine::write(const CallContext& context, const std::string& name, const Completion& completion,
                   const Caller& caller, const Write& write) {
  std::optional<Holding> holding;
  try {
    holding.emplace(*this, caller);
  } catch (const Fault& fault) {
    return completion(fault);
  } catch (const std::bad_alloc&) {
    return completion(fault_in_flight(name_));
  }
  ServedTable* const table = admitted(context, name, completion);
  if (table == nullptr) return;
  std::optional<Done> done;
  try {
    done = write(*table);
  } catch (const std::exception&) {
    return completed_writes_->failed(context, fault_in_flight(name_));
  }
  if (done) completed_writes_->applied(context, *done, name);
}

// Calls change(), which changes rows and returns how many were created or removed.
template <class Change>
int64_t Engine::changed(const Change& change) {
  check_lease();
  const int64_t rows = change();
  failpoint("shard.apply.after");
  return rows;
}

// Records a write: every change of a table's rows passes here, once, in the order of application.
Done Engine::record_write(ServedTable& table, Kind kind, int64_t rows) {
  ++table.writes;
  if (kind == Kind::push || kind == Kind::assign) table.created += rows;
  if (observer_) {
    const int64_t evicted = table.rows().num_evicted();
    observer_({kind, table.name(), rows, evicted - std::exchange(table.evicted, evicted)});
  }
  return {rows, false};
}

void Engine::write(const CallContext& context, const std::string& table, Kind kind, const Completion& completion,
                   const Apply& apply) {
  write(context, table, completion, {.has_turn = true},
        [&](ServedTable& found) -> std::optional<Done> { return record_write(found, kind, changed(apply)); });
}

void Engine::update_jointly(const CallContext& context, const std::string& table, const RankWrite& part,
                            const Completion& completion, const std::function<int64_t(const Parts& parts)>& apply) {
  write(context, table, completion, {.has_turn = true},
        [&](ServedTable& found) { return join(context, found, Kind::hosted, part, apply); });
}

void Engine::expire_sync_groups() {
  for (const RefusedPart& part : groups_->expire()) completed_writes_->failed(part.context, part.fault);
}

void Engine::fence(const std::string& job, int64_t incarnation, bool forget) {
  completed_writes_->fence(job, incarnation, false);
  for (const RefusedPart& part : groups_->fence(job, incarnation, forget))
    completed_writes_->failed(part.context, part.fault);
  if (forget) completed_writes_->fence(job, incarnation, true);
}

void Engine::fail_waiting(const std::string& table, const Fault& fault) {
  for (const CallContext& context : groups_->drop_table(table)) completed_writes_->failed(context, fault);
}

int64_t Engine::expire(const std::string& table, const Apply& apply) {
  check_lease();
  ServedTable& found = find(table);
  const int64_t gone = apply();
  if (gone != 0) record_write(found, Kind::expire, gone);
  return gone;
}

void Engine::push(const CallContext& context, const std::string& table, const PushRequest& request,
                  bool ids_are_distinct, const Completion& completion, const Caller& caller, PostPushRows* after) {
  MergedPush merged;
  try {
    merged.push = request;
    if (!ids_are_distinct) merge_equal_ids(merged, caller.others);
  } catch (const std::exception&) {
    return completion(fault_in_flight(name_));
  }
  bool is_earlier = false;
  write(context, table, completion, caller, [&](ServedTable& found) -> std::optional<Done> {
    const PushRequest& push = merged.push;
    if (!push.group) {
      BlockPauses between_blocks(&turn_, caller.others);
      const RowStoreSpec& spec = found.rows().spec();
      const bool fits =
          after != nullptr && !spec.counts_steps() && after->dtype == spec.dtype && push.count == request.count;
      const RowPlaces<char>* const rows = fits ? &after->rows : nullptr;
      const Done done = record_write(found, Kind::push, changed([&] {
        return found.push(push, between_blocks.of(bytes_of(push.count, push.dim, push.dtype)), rows);
      }));
      if (fits) after->writes = found.all_writes();
      is_earlier = found.is_expiry_due() && alarm_.note(kAtOnce);
      return done;
    }
    found.require_factors(push);
    found.require_width("gradients", push.dim);  // first: memory for its rows depends on it
    const RankWrite part{.push = push, .hosted = nullptr, .arrays = nullptr};
    const std::optional<Done> done = join(context, found, Kind::push, part, [&](const Parts& parts) {
      are_hosted(found.name(), parts);  // none of these is hosted; throws if another rank's is
      const JointPush joint = joint_push(parts, found.rows().spec().counts_occurrences);
      BlockPauses between_blocks(&turn_, caller.others);
      const int64_t created =
          found.push(joint.push, between_blocks.of(bytes_of(joint.push.count, joint.push.dim, joint.push.dtype)));
      for (const RankWrite* each : parts) found.note_staleness(each->push.batch);
      return created;
    });
    is_earlier = alarm_.note(found.is_expiry_due() ? kAtOnce : groups_->next_deadline());
    return done;
  });
  if (is_earlier) alarm_.ring();
}

void Engine::pull_beside(std::span<const TablePull> pulls, int64_t threads, const Caller& caller) {
  std::optional<Holding> holding;
  try {
    holding.emplace(*this, caller);
  } catch (const Fault& fault) {
    for (const TablePull& pull : pulls) *pull.outcome = fault;
    return;
  }
  Caller holder;
  holder.has_left = caller.has_left;
  holder.has_turn = true;
  deal_out(static_cast<int64_t>(pulls.size()), threads, [&](int64_t number, int64_t) {
    const TablePull& asked = pulls[static_cast<size_t>(number)];
    try {
      *asked.outcome = Done{.writes = pull(*asked.context, *asked.table, *asked.request, holder)};
    } catch (const std::exception&) {
      *asked.outcome = fault_in_flight(name_);
    }
  });
}

void Engine::push_beside(std::span<const TablePush> pushes, int64_t threads, const Caller& caller) {
  std::optional<Holding> holding;
  struct Begun {
    const TablePush* asked;
    ServedTable* table;
    Outcome outcome;
  };
  std::vector<Begun> begun;
  try {
    begun.reserve(pushes.size());
    holding.emplace(*this, caller);
  } catch (const std::exception&) {
    const Fault fault = fault_in_flight(name_);
    for (const TablePush& asked : pushes) asked.completion(fault);
    return;
  }
  for (const TablePush& asked : pushes)
    if (ServedTable* table = admitted(*asked.context, *asked.table, asked.completion))
      begun.push_back({&asked, table, {}});
  deal_out(static_cast<int64_t>(begun.size()), threads, [&](int64_t number, int64_t) {
    Begun& each = begun[static_cast<size_t>(number)];
    try {
      each.outcome = Done{changed([&] { return each.table->push(each.asked->push); }), false};
    } catch (const std::exception&) {
      each.outcome = fault_in_flight(name_);
    }
  });
  bool is_earlier = false;
  for (const Begun& each : begun) {
    const TablePush& asked = *each.asked;
    if (each.table->is_expiry_due() && alarm_.note(kAtOnce)) is_earlier = true;
    if (const Done* done = std::get_if<Done>(&each.outcome))
      completed_writes_->applied(*asked.context, record_write(*each.table, Kind::push, done->created), *asked.table);
    else completed_writes_->failed(*asked.context, std::get<Fault>(each.outcome));
  }
  holding.reset();
  if (is_earlier) alarm_.ring();
}

// Adds one rank's part; the last one applies all parts, and completes them.
std::optional<Done> Engine::join(const CallContext& context, ServedTable& table, Kind kind, const RankWrite& part,
                                 const std::function<int64_t(const Parts& parts)>& apply) {
  const std::string& name = table.name();
  if (groups_->is_applied(name, part)) return Done{0, true};
  const SyncGroups::Joined joined = groups_->join(context, name, part);
  // Otherwise its caller, if it is still there, would ask for its reply for ever.
  if (joined.replaced) completed_writes_->failed(joined.replaced->context, joined.replaced->fault);
  if (joined.complete == nullptr) return std::nullopt;
  Done done;
  try {
    done = record_write(table, kind, changed([&] { return apply(SyncGroups::parts(*joined.complete)); }));
  } catch (const std::exception&) {
    const Fault fault = fault_in_flight(name_);
    for (const auto& [rank, waiting] : groups_->abandon(*joined.complete))
      completed_writes_->failed(waiting.context, fault);
    return std::nullopt;
  }
  for (const auto& [rank, waiting] : groups_->complete(*joined.complete))
    completed_writes_->applied(waiting.context, done, name);
  return std::nullopt;
}

void Engine::assign(const CallContext& context, const std::string& table, const AssignRequest& request,
                    bool ids_are_distinct, const Completion& completion, const Caller& caller) {
  int64_t num_distinct = request.count;
  try {
    if (!ids_are_distinct) num_distinct = count_distinct(request, caller.others);
  } catch (const std::exception&) {
    return completion(fault_in_flight(name_));
  }
  write(context, table, completion, caller, [&](ServedTable& found) -> std::optional<Done> {
    if (num_distinct < request.count)
      throw Fault("InvalidRows", std::to_string(request.count) + " ids to assign hold " +
                                     std::to_string(request.count - num_distinct) +
                                     (request.count - num_distinct == 1 ? " duplicate" : " duplicates") +
                                     "; give each id once");
    BlockPauses between_blocks(&turn_, caller.others);
    Pauses* const pauses = between_blocks.of(bytes_of(request.count, request.dim, request.dtype));
    return record_write(found, Kind::assign, changed([&] { return found.assign(request, pauses); }));
  });
}

void Engine::add_table(std::shared_ptr<ServedTable> table) {
  completed_writes_->expect(table->name());
  tables_by_name_[table->name()] = table.get();
  tables_.push_back(std::move(table));
}

void Engine::remove_table(const std::string& name) {
  tables_by_name_.erase(name);
  std::erase_if(tables_, [&](const auto& table) { return table->name() == name; });
}

ServedTable* Engine::find_or_null(const std::string& name) const {
  const auto found = tables_by_name_.find(name);
  return found == tables_by_name_.end() ? nullptr : found->second;
}

ServedTable& Engine::find(const std::string& name) const {
  ServedTable* table = find_or_null(name);
  if (table == nullptr) throw not_found(name);
  table->require_whole();
  return *table;
}

Fault Engine::not_found(const std::string& name) const {
  std::string known;
  for (const auto& table : tables_) known += (known.empty() ? "" : ", ") + quoted(table->name());
  return {"TableNotFound",
          "there is no table " + quoted(name) + "; tables of this cluster: " + (known.empty() ? "none" : known)};
}

}  // namespace geartrain
