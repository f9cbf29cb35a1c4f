// Values of a call at a shard: caller, operation, reply and fault. Carriers decode them, the engine reads them.
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

// Highest sequence number or incarnation that a caller may choose. As many numbers above it stay unused.
inline constexpr int64_t kMaxChosen = int64_t{1} << 62;

// Caller, and the shard state that it expects: CallContext of ams/values/shard_messages.py. 0 or empty: not set; any
// state is accepted.
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

// Reply to a write or a pull. The rows of a pull are in its PullRequest.
struct Done {
  int64_t created = 0;     // rows that did not exist before
  bool duplicate = false;  // an earlier attempt was applied; this is its reply
  int64_t writes = 0;      // of a pull: number of writes that the shard has applied to the table
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
// Callback with the outcome of a write. Called exactly once, on any thread, possibly before the call that takes it
// returns. Does not throw.
using Completion = std::function<void(const Outcome&)>;

using Scalars = std::vector<std::pair<std::string, double>>;  // settings of the table's optimizer, by name

// The caller owns all arrays of a request, and keeps them until the outcome is known. Arrays are C-contiguous.
// Legend: N ids of one request, D = dim of the table.
struct PullRequest {
  const int64_t* ids = nullptr;  // [N]
  int64_t count = 0;             // N
  int64_t dim = 0;               // D
  DType dtype = DType::float32;  // of `rows`: the table's type, or a 16-bit type to which float32 rows are rounded
  std::optional<DType> wire;     // float32 rows are sent in this 16-bit type, then widened to float32; none: `dtype`
  char* rows = nullptr;                // [M, D], M >= N: the row of ids[i] goes to rows[positions[i]]
  char* const* each = nullptr;         // [M] or null: address of each row, if `rows` is not one array
  uint8_t* present = nullptr;          // [M] or null: whether the row exists
  const int64_t* positions = nullptr;  // [N] or null: 0 ... N - 1
  int64_t size = 0;                    // M
  std::optional<SyncGroup> required_sync;  // answer only if exactly the writes before its sequence are applied

  RowPlaces<char> places() const { return {rows, each, positions}; }
  // Type of the rows in a frame.
  DType wire_dtype() const { return wire.value_or(dtype); }
};

// Batch metadata of a push, for tables that need it: admission, expiry and staleness.
struct BatchFacts {
  const uint32_t* occurrences = nullptr;  // [N]: how often each id was in the batch; null: once
  std::optional<int64_t> step;            // of the worker, >= 0
  std::optional<double> unix_seconds;     // by the worker's clock, finite and >= 0
  std::optional<int64_t> pulled_at;       // Done::writes of the pull of these rows

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
  // if `gradients` is null: address of each gradient; for distinct ids without a group
  RowPlaces<const char> scattered;
  std::optional<double> lr;            // none: the table's learning rate
  double scale = 1.0;
  Scalars scalars;
  std::optional<SyncGroup> group;
  bool step_goes_on = false;  // more pushes of the same step follow
  BatchFacts batch;

  RowPlaces<const char> places() const { return gradients != nullptr ? RowPlaces<const char>{gradients} : scattered; }
};

// Pull fused with a push: returns the pushed rows while they are in the CPU cache, before any other change.
struct PostPushRows {
  RowPlaces<char> rows;  // output: one row for each id of the push
  DType dtype = DType::float32;
  int64_t writes = 0;    // Done::writes after the push; 0: the push was not applied by this call, and no row was output
};

struct AssignRequest {
  const int64_t* ids = nullptr;  // [N], distinct
  int64_t count = 0;
  int64_t dim = 0;
  DType dtype = DType::float32;
  const char* rows = nullptr;  // [N, D]
};

// Queue of other callers' requests, which the thread of a large request serves between two of its blocks.
class OtherCallers {
 public:
  virtual ~OtherCallers() = default;
  // Returns whether a request may be waiting. Cheap.
  virtual bool is_asked() = 0;
  // Serves small pulls; all other requests stay in the queue. `has_turn`: this thread holds the shard's lock.
  virtual void serve_pulls(bool has_turn) noexcept = 0;
};

}  // namespace geartrain
