// What a shard does with requests for rows, without the interpreter. Python makes, opens and drops tables, freezes, restores and
// hosts programs in turns of the same line.
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

// Who waits for a request to be done.
struct Caller {
  const std::atomic<bool>* has_left = nullptr;  // nothing is begun for one who has
  Turn::Look look;                              // see Turn::Look
  bool has_turn = false;                        // has it already, and keeps it
  OtherCallers* others = nullptr;               // whom else the thread serves
};

// A write that was applied, as it left the engine.
struct RowChange {
  enum class Kind { push, assign, remove, expire, hosted };
  Kind kind;
  const std::string& table;
  int64_t rows = 0;     // that a write created, or that went
  int64_t evicted = 0;  // that went to make room for it
};

// Thread-safe but for what says otherwise. No interpreter lock is needed, and who calls must not have it unless he has the turn.
class Engine {
 public:
  // `lease`: until when the shard is its own; null: nobody else can hold it.
  Engine(int64_t shard, int64_t incarnation, int64_t cluster_version, std::shared_ptr<Lease> lease,
         std::shared_ptr<CompletedWrites> completed_writes, std::shared_ptr<SyncGroups> groups);

  Turn& turn() { return turn_; }
  // Of the deadlines of groups, rung when one waits that did not before.
  Alarm& alarm() { return alarm_; }
  std::atomic<int64_t>& cluster_version() { return cluster_version_; }
  // Of calls that its carriers brought.
  CallCounters& counters() { return counters_; }

  // Throws the Faults ShardUnavailable: the shard may belong to another process; ShardRestarted, StaleCluster: another past than
  // this shard's is meant.
  void check_fence(int64_t shard_incarnation, int64_t cluster_version);
  // Throws the first of those.
  void check_lease() {
    if (lease_) lease_->check();
  }

  // A large request is done in blocks. Between two of them come pulls that are brief (no larger than a block, and of no step of a
  // group), for no longer than it has worked itself; everything else waits until it is done.

  // Writes rows to where the request says, and returns the writes that the table has had, those before a restore, too. Throws
  // Faults; nothing was written then.
  int64_t pull(const CallContext& context, const std::string& table, const PullRequest& request, const Caller& caller = {});

  // Each is applied once, whole or not at all. `completion` is called once, here or, of a write that waits for other ranks, later:
  // its arrays are copied. Only what the caller's look throws is thrown, and then nothing was begun. Equal ids of a push are merged
  // first, unless `ids_are_distinct` says that there are none; those of an assign are refused. `after`: see RowsAfter; not of groups,
  // and not where ids are equal.
  void push(const CallContext& context, const std::string& table, const PushRequest& request, bool ids_are_distinct,
            const Completion& completion, const Caller& caller = {}, RowsAfter* after = nullptr);
  void assign(const CallContext& context, const std::string& table, const AssignRequest& request, bool ids_are_distinct,
              const Completion& completion, const Caller& caller = {});

  // Writes of which Python knows how they are done, in a turn: `apply` changes rows and returns how many came or went.
  using Kind = RowChange::Kind;
  using Apply = std::function<int64_t()>;
  void write(const CallContext& context, const std::string& table, Kind kind, const Completion& completion, const Apply& apply);
  // One rank's part of a write by a hosted model. The last one applies those of all, `parts` in rank order.
  using Parts = std::vector<const RankWrite*>;
  void update_jointly(const CallContext& context, const std::string& table, const RankWrite& part, const Completion& completion,
                      const std::function<int64_t(const Parts& parts)>& apply);
  // Rows that go by a rule of the table, without a caller. If none does it is no write. Returns how many. Throws ShardUnavailable, and what `apply` does.
  int64_t expire(const std::string& table, const Apply& apply);
  // Tell those that wait for other ranks that they wait no more: whose time is up; of streams that a fence shuts out, see
  // CompletedWrites::fence; in a table.
  void expire_groups();
  void fence(const std::string& job, int64_t incarnation, bool forget);
  void fail_waiting(const std::string& table, const Fault& fault);
  // Told of every change of rows, in the order in which they are applied: pushes by ranks once, as one.
  void observe(std::function<void(const RowChange&)> observer) { observer_ = std::move(observer); }

  // Those of one table, of several in one turn, on up to `threads` threads: of no groups, of distinct ids, no larger than a block,
  // and pushes to different tables.
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

  // Refuses requests that come from now on (ShardUnavailable); those that wait for the turn are done.
  void close() { is_closed_ = true; }
  // Refuses those, too. By whoever has the turn.
  void end() { has_ended_ = true; }
  // Refuses all of them so (InternalError): something of the shard is broken.
  void fail(std::string reason);

  // Tables are changed by whoever has the turn and the interpreter lock, and read by whoever has either.
  void add_table(std::shared_ptr<ServedTable> table);
  void remove_table(const std::string& name);
  // What is told of a name that no table has.
  Fault not_found(const std::string& name) const;

 private:
  class Holding;

  ServedTable* find_or_null(const std::string& name) const;
  ServedTable& find(const std::string& name) const;
  ServedTable* admitted(const CallContext& context, const std::string& name, const Completion& completion);
  template <class Change>
  int64_t changed(const Change& change);
  Done leave(ServedTable& table, Kind kind, int64_t rows);
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
