// One attempt of a client at some of its shards in parallel: requests, and their outcomes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "carriers/connection.hpp"
#include "client/frame_call.hpp"
#include "client/prepared_write.hpp"
#include "engine/engine.hpp"

namespace geartrain {

// No connection to the shard, or it refuses such calls, or was lost before the reply: another connection may carry the
// call.
struct NotConnected {};
// No reply in time. After this and NotConnected it is unknown whether the shard did it.
struct Late {};
using PartOutcome = std::variant<NotConnected, Late, Fault, Done>;

// Time limit of an attempt, and the caller's check meanwhile.
struct Attempt {
  double seconds = 0;    // each shard's time limit for its reply
  SteadyTime deadline;   // end of that time
  // Called about every 100 ms with the shards that have not replied; true gives up (Late). Its exceptions are passed
  // on, and the caller's arrays are then free.
  std::function<bool(std::span<const int64_t>)> look;
};

// Access to a shard: an engine of this process, a connection, or none.
struct Endpoint {
  int64_t incarnation = 0;  // expected incarnation of the shard
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Connection> connection;
};

// Shards of a cluster.
struct View {
  std::vector<Endpoint> endpoints;
  int64_t cluster_version = 0;
  bool has_connections = false;
};

// Receives a write's outcome from an engine.
class Settled;

// Requests to one shard in one call.
struct Job {
  int64_t shard = 0;
  const Endpoint* endpoint = nullptr;
  std::vector<Operation> operations;
  // of writes; nulls for a pull of the rows written before it
  std::vector<std::pair<const PreparedWrite*, const ShardPart*>> rows;
  std::vector<PartOutcome> outcomes;
  std::optional<FrameCall> call;                   // if the shard is behind a connection
  std::vector<std::shared_ptr<Settled>> settled;  // of writes to an engine; null for a pull after one

  void end(const PartOutcome& outcome) { outcomes.assign(operations.size(), outcome); }
  bool is_here() const { return endpoint->engine != nullptr; }
  // Whether operation i is a pull of the rows that the write before it wrote.
  bool follows_a_write(size_t i) const { return i < rows.size() && rows[i].first == nullptr; }
};

// Of one thread at a time.
class Exchange {
 public:
  // The arguments stay as they are, except the jobs' outcomes.
  Exchange(std::vector<Job>& jobs, const View& view, const Attempt& attempt);
  // Makes all calls, and waits for all outcomes.
  void run();
  // Sends the calls of shards behind connections; the others are NotConnected. False: a connection has no room, and
  // nothing was sent; only unless `may_wait`.
  bool send(bool may_wait);
  // Waits, asleep, until these jobs have replied or `until` is over; returns whether they have.
  bool receive_until(SteadyTime until);
  // The shards that have not replied.
  std::vector<int64_t> waiting() const;

 private:
  bool look() const { return attempt_.look && attempt_.look(waiting()); }
  void write_once_there_is_room(Job& job);
  void write(Job& job, bool may_wait) const;
  void send(Job& job) const;
  bool receive(Job& job, SteadyTime until, bool may_spin);
  void perform_here();
  static void perform(Job& job, int64_t threads, const Caller& caller);
  static bool pull_beside(Job& job, int64_t threads, const Caller& caller);
  static bool push_beside(Job& job, int64_t threads, const Caller& caller);
  static void write_here(Job& job, size_t at, const Caller& caller);
  void await_writes(Job& job) const;

  std::vector<Job>& jobs_;
  const Attempt& attempt_;
};

}  // namespace geartrain
