// Values of a call at a shard: caller, operation, answer and fault, as carriers bring them and the engine reads them.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/common.hpp"
#include "base/row_places.hpp"

namespace geartrain {

// A client may be at most this many writes ahead of its oldest unacknowledged one.
inline constexpr int64_t kWriteWindow = 1024;

// Highest number that a caller may choose: as many are left above it.
inline constexpr int64_t kMaxChosen = int64_t{1} << 62;

// Caller, and the shard state it expects: CallContext of ams/values/shard_messages.py. 0 or empty: none, or any.
struct CallContext {
  std::string stream;
  int64_t incarnation = 0;
  int64_t sequence = 0;
  int64_t oldest_unacknowledged = 0;
  int64_t shard_incarnation = 0;
  int64_t cluster_version = 0;
  int64_t table_incarnation = 0;
};

// One rank's part of a synchronous write: SyncGroup of the same file.
struct SyncGroup {
  std::string job;
  int64_t world_size = 0;
  int64_t rank = 0;
  int64_t sequence = 0;
  int64_t sample_count = 0;
};

// Answer to a write, or to a pull, whose rows are elsewhere.
struct Done {
  int64_t created = 0;     // rows that did not exist before
  bool duplicate = false;  // an earlier attempt had been applied; this is its answer
  int64_t writes = 0;      // of a pull: those that the table had had on the shard
};

// A refusal. `name` is a class in ams/values/errors.py: the wire and Python make its error.
struct Fault : std::exception {
  Fault(std::string error_name, std::string text, double retry_after = 0)
      : name(std::move(error_name)), message(std::move(text)), retry_after_seconds(retry_after) {}
  const char* what() const noexcept override { return message.c_str(); }

  std::string name;
  std::string message;
  double retry_after_seconds;  // of Busy; 0 of all others
};

using Outcome = std::variant<Done, Fault>;
// Receives the end of a write. Called exactly once, on any thread, possibly before the call it was given to returns;
// does not throw.
using Completion = std::function<void(const Outcome&)>;

using Scalars = std::vector<std::pair<std::string, double>>;  // numbers of the table's optimizer, by name

// Arrays are the caller's, and stay until the outcome is known. N ids of one request, D = dim of the table;
// C-contiguous.
struct PullRequest {
  const int64_t* ids = nullptr;  // [N]
  int64_t count = 0;             // N
  int64_t dim = 0;               // D
  DType dtype = DType::float32;  // of `rows`: the table's, or one of 16 bits that rows of float32 are rounded to
  std::optional<DType> wire;     // that of a table of float32: rounded to this, then widened to float32; none: `dtype`
  char* rows = nullptr;                // [M, D], M >= N: the row of ids[i] goes to rows[positions[i]]
  char* const* each = nullptr;         // [M] or null: where each of them lies, if not one after the other
  uint8_t* present = nullptr;          // [M] or null: whether the row exists
  const int64_t* positions = nullptr;  // [N] or null: 0 ... N - 1
  int64_t size = 0;                    // M
  std::optional<SyncGroup> required_sync;  // answer only if exactly the writes before its sequence are applied

  RowPlaces<char> places() const { return {rows, each, positions}; }
  // Type of the rows in a frame.
  DType wire_dtype() const { return wire.value_or(dtype); }
};

// Facts about the batch of a push, for tables that need them.
struct BatchFacts {
  const uint32_t* occurrences = nullptr;  // [N]: how often each id was in the batch; null: once
  std::optional<int64_t> step;            // of the worker, >= 0
  std::optional<double> unix_seconds;     // by the worker's clock, finite and >= 0
  std::optional<int64_t> pulled_at;       // the writes that the table had had on the shard when the rows were pulled

  uint32_t occurrences_of(int64_t i) const { return occurrences == nullptr ? 1 : occurrences[i]; }
};

// Saturates at 2**32 - 1.
inline void add_occurrences(uint32_t& sum, uint32_t more) { sum = sum > UINT32_MAX - more ? UINT32_MAX : sum + more; }

struct PushRequest {
  const int64_t* ids = nullptr;  // [N], distinct
  int64_t count = 0;
  int64_t dim = 0;
  DType dtype = DType::float32;
  const char* gradients = nullptr;     // [N, D]
  RowPlaces<const char> scattered;     // where they lie instead, if gradients is null: of distinct ids, and of no group
  std::optional<double> lr;            // none: that of the table
  double scale = 1.0;
  Scalars scalars;
  std::optional<SyncGroup> group;
  bool step_goes_on = false;  // more pushes of the same step follow
  BatchFacts batch;

  RowPlaces<const char> places() const { return gradients != nullptr ? RowPlaces<const char>{gradients} : scattered; }
};

// Pull of a push's rows right after it: they are written while they are in the cache, before any other change.
struct PostPushRows {
  RowPlaces<char> rows;  // of as many ids
  DType dtype = DType::float32;
  int64_t writes = 0;    // that the table has had by then; 0: this push was not applied now, and no row was written
};

struct AssignRequest {
  const int64_t* ids = nullptr;  // [N], distinct
  int64_t count = 0;
  int64_t dim = 0;
  DType dtype = DType::float32;
  const char* rows = nullptr;  // [N, D]
};

// Other callers that the thread of a large request can serve between two of its blocks.
class OtherCallers {
 public:
  virtual ~OtherCallers() = default;
  // Whether there may be a request. Cheap.
  virtual bool is_asked() = 0;
  // Serves brief pulls and leaves all else for later. `has_turn`: this thread has the shard's turn.
  virtual void serve_pulls(bool has_turn) noexcept = 0;
};

}  // namespace geartrain
