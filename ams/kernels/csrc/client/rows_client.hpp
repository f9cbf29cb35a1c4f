// Row calls of one client to the shards of a cluster: a pull or write goes to all of them at once, each once.
//
// Unfinished shards are returned: retries, and their timing, are the caller's decision.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "client/cut_calls.hpp"

namespace geartrain {

// Thread-safe.
class RowsClient {
 public:
  explicit RowsClient(Placement placement);
  ~RowsClient();

  const Placement& placement() const { return placement_; }
  // Sets the access to a shard: an engine of this process, a connection, or none; and the expected incarnation.
  void set_endpoint(int64_t shard, int64_t incarnation, std::shared_ptr<Engine> engine,
                    std::shared_ptr<Connection> connection);
  void set_cluster_version(int64_t version);

  // `request` has no positions: out is [count, dim]. Repeated ids are sent once. Rows of other shards stay unchanged.
  Undone pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, const Attempt& attempt,
              Shards shards = {});

  // The same for several tables with distinct ids, one frame a shard for all. Returns each one's outcome.
  std::vector<Pulled> pull(std::span<const TablePull> pulls, const Attempt& attempt);

  // Sends all writes in one frame a shard; returns the outcomes of each, in the order of its parts that are sent.
  WriteOutcomes write(std::span<const Write> writes, const Attempt& attempt);
  // One write with its rows after it; `writes`: see WriteCall::writes_after.
  std::vector<PartOutcome> write_and_pull(const Write& write, const Attempt& attempt,
                                          std::optional<std::vector<int64_t>>& writes);

  // Only sends the call: next_reply() returns the outcome, with `tag`. Shards of this process are NotConnected. The
  // arguments stay unchanged until then; `attempt.look` is called until this returns. False: too many calls are in
  // flight, and nothing was sent.
  bool begin_pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, Attempt attempt,
                  std::shared_ptr<void> tag);
  bool begin_write(const Write& write, Attempt attempt, std::shared_ptr<void> tag);
  struct Reply {
    std::shared_ptr<void> tag;
    std::variant<Undone, std::vector<PartOutcome>> outcome;
  };
  // Waits for a finished call and returns its outcome. None: none until then, or a nudge(). Used by one thread.
  std::optional<Reply> next_reply(SteadyTime until);
  // Shards for which calls begun before then wait. Used by that thread.
  std::vector<int64_t> waiting(SteadyTime since) const;
  // Ends next_reply(), the present or the next call of it.
  void nudge();

 private:
  struct Sent;

  std::shared_ptr<const View> view() const;
  template <class Change>
  void change(const Change& change);
  template <class Prepare>
  bool begin(size_t bytes, Attempt attempt, std::shared_ptr<void> tag, const Prepare& prepare);
  void forget(size_t bytes);

  const Placement placement_;
  mutable std::mutex mutex_;
  std::shared_ptr<const View> view_;  // replaced, never changed

  mutable std::mutex sent_mutex_;  // guards what follows
  std::condition_variable news_;
  bool has_news_ = false;
  size_t num_sent_ = 0, sent_bytes_ = 0;  // includes calls that are being sent
  std::list<std::unique_ptr<Sent>> sent_;
};

}  // namespace geartrain
