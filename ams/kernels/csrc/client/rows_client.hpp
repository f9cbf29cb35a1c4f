// The shards of a cluster as one client calls them: a pull or write goes to all that it concerns at once, each once.
//
// What an attempt does not bring to its end is handed back, shard by shard: whether to try again, and when, is the caller's to say.
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
  // How a shard is reached from now on: an engine of this process, a connection, or not at all; and which of all that ever held the
  // shard's number is meant.
  void set_endpoint(int64_t shard, int64_t incarnation, std::shared_ptr<Engine> engine, std::shared_ptr<Connection> connection);
  void set_cluster_version(int64_t version);

  // `request` has no positions: out is [count, dim]. Ids that occur twice travel once. The rows of shards that are not asked stay as
  // they are.
  Undone pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, const Attempt& attempt,
              Shards shards = {});

  // The same of several tables, one frame a shard for all of them, and ids that are distinct. What each comes to.
  std::vector<Pulled> pull(std::span<const TablePull> pulls, const Attempt& attempt);

  // One frame a shard for all of them; the outcomes of each, in the order of its parts that are sent.
  WriteOutcomes write(std::span<const Write> writes, const Attempt& attempt);
  // One write with the rows after it; `writes`: see WriteCall::writes_after.
  std::vector<PartOutcome> write_and_pull(const Write& write, const Attempt& attempt, std::optional<std::vector<int64_t>>& writes);

  // The same, but sent only: next_reply() brings the outcome, with `tag`. Shards of this process are NotConnected. All that is given stays as
  // it is until then; `attempt.look` is asked until this returns. False: so many are under way that this one has to wait for one of
  // them to end, and nothing was sent.
  bool begin_pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, Attempt attempt,
                  std::shared_ptr<void> tag);
  bool begin_write(const Write& write, Attempt attempt, std::shared_ptr<void> tag);
  struct Reply {
    std::shared_ptr<void> tag;
    std::variant<Undone, std::vector<PartOutcome>> outcome;
  };
  // Of a call that has come to its end; waits for one. None: nothing until then, or a nudge(). Of one thread.
  std::optional<Reply> next_reply(SteadyTime until);
  // The shards that calls begun so, before then, wait for. Of that thread.
  std::vector<int64_t> waiting(SteadyTime since) const;
  // Ends next_reply(), now or the next.
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
  size_t num_sent_ = 0, sent_bytes_ = 0;  // of those that are being sent, too
  std::list<std::unique_ptr<Sent>> sent_;
};

}  // namespace geartrain
