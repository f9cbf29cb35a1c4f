// One attempt of a client at some of its shards, side by side: what goes to each, and what becomes of it.
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

// There is no connection to the shard, or it refuses such calls, or was lost before the reply came: the same call can go over another.
struct NotConnected {};
// No reply came in time. Of this and of NotConnected it is unknown whether the shard has done it.
struct Late {};
using PartOutcome = std::variant<NotConnected, Late, Fault, Done>;

// How long an attempt may take, and who looks after the caller meanwhile.
struct Attempt {
  double seconds = 0;    // that each shard behind a connection has for its reply
  SteadyTime deadline;   // when they are over
  // Asked about every 100 ms with the shards that have not replied: whether to give up (Late). What it throws is thrown, and the
  // caller's arrays are its own again.
  std::function<bool(std::span<const int64_t>)> look;
};

// How a shard is reached: an engine of this process, a connection, or not at all.
struct Endpoint {
  int64_t incarnation = 0;  // which of all that ever held the shard's number is meant
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Connection> connection;
};

// The shards of a cluster.
struct View {
  std::vector<Endpoint> endpoints;
  int64_t cluster_version = 0;
  bool has_connections = false;
};

// Where an engine puts the outcome of a write.
class Settled;

// What goes to one shard in one call.
struct Job {
  int64_t shard = 0;
  const Endpoint* endpoint = nullptr;
  std::vector<Operation> operations;
  std::vector<std::pair<const PreparedWrite*, const ShardPart*>> rows;  // of writes; nulls of a pull of what the write before it wrote
  std::vector<PartOutcome> outcomes;
  std::optional<FrameCall> call;                   // of a shard behind a connection
  std::vector<std::shared_ptr<Settled>> settled;  // of writes to an engine; null of a pull after one

  void end(const PartOutcome& outcome) { outcomes.assign(operations.size(), outcome); }
  bool is_here() const { return endpoint->engine != nullptr; }
  // Whether operation i is a pull of what the write before it wrote.
  bool follows_a_write(size_t i) const { return i < rows.size() && rows[i].first == nullptr; }
};

// Of one thread at a time.
class Exchange {
 public:
  // All of these stay as they are, but for what the jobs come to.
  Exchange(std::vector<Job>& jobs, const View& view, const Attempt& attempt);
  // Makes all calls, and waits for all outcomes.
  void run();
  // Makes the calls of the shards behind connections; the others are NotConnected. False: a connection has no room for one, and nothing was
  // sent; only unless `may_wait`.
  bool send(bool may_wait);
  // Whether those have replied, or their time is over. Waits for it until then, asleep.
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
