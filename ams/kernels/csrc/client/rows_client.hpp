// The shards of a cluster as one client calls them: a pull or write goes to all that it concerns at once, each once.
//
// What an attempt does not bring to its end is handed back, shard by shard: whether to try again, and when, is the caller's to say.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "carriers/connection.hpp"
#include "client/prepared_write.hpp"
#include "engine/engine.hpp"

namespace geartrain {

// There is no way to the shard, or no room on it, or it was lost before the reply came: the same call can go another way.
struct NoWay {};
// No reply came in time. Of this and of NoWay it is unknown whether the shard has done it.
struct Late {};
using PartOutcome = std::variant<NoWay, Late, Fault, Done>;

// How long an attempt may take, and who looks after the caller meanwhile.
struct Attempt {
  double seconds = 0;    // that each shard behind a connection has for its reply
  SteadyTime deadline;   // when they are over
  // Asked about every 100 ms with the shards that have not replied: whether to give up (Late). What it throws is thrown, and the
  // caller's arrays are its own again.
  std::function<bool(std::span<const int64_t>)> look;
};

// Thread-safe.
class RowsClient {
 public:
  explicit RowsClient(Placement placement);

  const Placement& placement() const { return placement_; }
  // How a shard is reached from now on: an engine of this process, a connection, or not at all; and which of all that ever held the
  // shard's number is meant.
  void set_way(int64_t shard, int64_t incarnation, std::shared_ptr<Engine> engine, std::shared_ptr<Connection> connection);
  void set_cluster_version(int64_t version);

  struct Part {
    int64_t shard;
    PartOutcome outcome;
  };
  // `request` has no positions: out is [count, dim]. Ids that occur twice travel once.
  std::vector<Part> pull(const TableFacts& table, int64_t table_incarnation, const PullRequest& request, const Attempt& attempt);

  struct Write {
    const PreparedWrite* prepared;
    CallContext context;
  };
  // One frame a shard for all of them; the outcomes of each, in the order of its parts.
  std::vector<std::vector<PartOutcome>> write(std::span<const Write> writes, const Attempt& attempt);

 private:
  struct Way {
    int64_t incarnation = 0;
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Connection> connection;
  };
  struct View {
    std::vector<Way> ways;
    int64_t cluster_version = 0;
    bool has_connections = false;
  };
  struct Job;
  class Exchange;

  std::shared_ptr<const View> view() const;
  template <class Change>
  void change(const Change& change);

  const Placement placement_;
  mutable std::mutex mutex_;
  std::shared_ptr<const View> view_;  // replaced, never changed
};

}  // namespace geartrain
