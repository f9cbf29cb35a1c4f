// Engine of a shard: handles requests for rows without the interpreter. Python makes, publishes and drops tables,
// freezes, restores and hosts programs in turns of the same queue.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "calls/call.hpp"
#include "calls/call_counters.hpp"
#include "engine/alarm.hpp"
#include "engine/served_table.hpp"
#include "engine/turn.hpp"
#include "writes/completed_writes.hpp"
#include "writes/lease.hpp"
#include "writes/sync_groups.hpp"

namespace geartrain {

// Caller that waits for a request.
struct Caller {
  const std::atomic<bool>* has_left = nullptr;  // if set, nothing is started for it
  Turn::Look look;                              // see Turn::Look
  bool has_turn = false;                        // it has the turn already, and keeps it
  OtherCallers* others = nullptr;               // other callers served by its thread
};

// Applied write, for observers of the engine.
struct RowChange {
  enum class Kind { push, assign, remove, expire, hosted };
  Kind kind;
  const std::string& table;
  int64_t rows = 0;     // created or removed
  int64_t evicted = 0;  // evicted to make room for it
};

// Thread-safe except where noted. The interpreter lock is not needed, and the caller must not hold it unless it has the
// turn.
class Engine {
 public:
  // `lease`: time until which this process holds the shard; null: no other can hold it.
  Engine(int64_t shard, int64_t incarnation, int64_t cluster_version, std::shared_ptr<Lease> lease,
         std::shared_ptr<CompletedWrites> completed_writes, std::shared_ptr<SyncGroups> groups);

  Turn& turn() { return turn_; }
  // Alarm of the deadlines of sync groups, rung when a group starts to wait.
  Alarm& alarm() { return alarm_; }
  std::atomic<int64_t>& cluster_version() { return cluster_version_; }
  // Counters of the calls of its carriers.
  CallCounters& counters() { return counters_; }

  // Throws the Faults ShardUnavailable: the shard may belong to another process; ShardRestarted, StaleCluster: the
  // caller expects another incarnation or cluster version.
  void check_fence(int64_t shard_incarnation, int64_t cluster_version);
  // Throws ShardUnavailable as above.
  void check_lease() {
    if (lease_) lease_->check();
  }

  // A large request is done in blocks. Between two of them brief pulls are served (no larger than a block, and of no
  // step of a group), for no longer than it has worked itself; all other requests wait until it is done.

  // Writes rows to the request's memory, and returns the number of writes to the table, including those before a
  // restore. Throws Faults; nothing was written then.
  int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request,
               const Caller& caller = {});

  // Both apply a write once, whole or not at all. `completion` is called once, here or, for a write that waits for
  // other ranks, later: its arrays are copied. Only errors of the caller's look are thrown, before anything is begun.
  // Equal ids of a push are merged first, unless `ids_are_distinct`; those of an assign are refused. `after`: see
  // PostPushRows; not for groups, and not with equal ids.
  void push(const CallContext& context, const std::string& table, const PushRequest& request, bool ids_are_distinct,
            const Completion& completion, const Caller& caller = {}, PostPushRows* after = nullptr);
  void assign(const CallContext& context, const std::string& table, const AssignRequest& request, bool ids_are_distinct,
              const Completion& completion, const Caller& caller = {});

  // Applies a write by Python code, in a turn: `apply` changes rows and returns the number created or removed.
  using Kind = RowChange::Kind;
  using Apply = std::function<int64_t()>;
  void write(const CallContext& context, const std::string& table, Kind kind, const Completion& completion,
             const Apply& apply);
  // Applies one rank's part of a write by a hosted model. The last part applies those of all, `parts` in rank order.
  using Parts = std::vector<const RankWrite*>;
  void update_jointly(const CallContext& context, const std::string& table, const RankWrite& part,
                      const Completion& completion, const std::function<int64_t(const Parts& parts)>& apply);
  // Removes expired rows of a table, without a caller, and returns their number; without any it is no write. Throws
  // ShardUnavailable, and the errors of `apply`.
  int64_t expire(const std::string& table, const Apply& apply);
  // Fail calls that wait for other ranks: overdue ones; those of streams that a fence shuts out, see
  // CompletedWrites::fence; those of a table.
  void expire_sync_groups();
  void fence(const std::string& job, int64_t incarnation, bool forget);
  void fail_waiting(const std::string& table, const Fault& fault);
  // Sets the observer of every change of rows, in the order of application: pushes by ranks once, as one.
  void observe(std::function<void(const RowChange&)> observer) { observer_ = std::move(observer); }

  // Pulls or pushes of one table each, several in one turn, on up to `threads` threads: of no groups, of distinct ids,
  // no larger than a block, and pushes to different tables.
  struct TablePull {
    const CallContext* context;
    const std::string* table;
    const PullRequest* request;
    Outcome* outcome;
  };
  void pull_beside(std::span<const TablePull> pulls, int64_t threads, const Caller& caller);
  struct TablePush {
    const CallContext* context;
    const std::string* table;
    PushRequest push;
    Completion completion;
  };
  void push_beside(std::span<const TablePush> pushes, int64_t threads, const Caller& caller);

  // Refuses later requests (ShardUnavailable); those that wait for the turn are done.
  void close() { is_closed_ = true; }
  // Refuses waiting ones, too. Called with the turn.
  void end() { has_ended_ = true; }
  // Fails all requests with this reason (InternalError): the shard is broken.
  void fail(std::string reason);

  // Tables are changed by a thread with both the turn and the interpreter lock, and read with either.
  void add_table(std::shared_ptr<ServedTable> table);
  void remove_table(const std::string& name);
  // Returns the fault for a name without a table.
  Fault not_found(const std::string& name) const;

 private:
  class Holding;

  ServedTable* find_or_null(const std::string& name) const;
  ServedTable& find(const std::string& name) const;
  ServedTable* admitted(const CallContext& context, const std::string& name, const Completion& completion);
  template <class Change>
  int64_t changed(const Change& change);
  Done record_write(ServedTable& table, Kind kind, int64_t rows);
  std::optional<Done> join(const CallContext& context, ServedTable& table, Kind kind, const RankWrite& part,
                           const std::function<int64_t(const Parts& parts)>& apply);
  template <class Write>
  void write(const CallContext& context, const std::string& table, const Completion& completion, const Caller& caller,
             const Write& write);

  const int64_t shard_, incarnation_;
  const std::string name_;  // "shard 3"
  std::atomic<int64_t> cluster_version_;
  std::atomic<bool> is_closed_{false};
  bool has_ended_ = false;
  std::atomic<const Fault*> failure_{nullptr};
  std::unique_ptr<const Fault> kept_failure_;
  const std::shared_ptr<Lease> lease_;
  const std::shared_ptr<CompletedWrites> completed_writes_;
  const std::shared_ptr<SyncGroups> groups_;
  Turn turn_;
  Alarm alarm_;
  CallCounters counters_;
  std::function<void(const RowChange&)> observer_;
  std::vector<std::shared_ptr<ServedTable>> tables_;  // as they were made
  std::unordered_map<std::string, ServedTable*> tables_by_name_;
};

}  // namespace geartrain
