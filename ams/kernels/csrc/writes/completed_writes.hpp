// Deduplication of writes: a shard recognises repeated writes, and applies each once (RIFL, section 3).
//
// The key is (stream, sequence), not the process. A completed write is forgotten when the client acknowledges its
// reply, and when a fence restarts the job. If two processes write as one stream, the one with the lower incarnation
// was superseded, and is refused (StaleClient). Snapshots store this as *dedup state*: freeze/dedup.py.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "calls/call.hpp"
#include "writes/recency_map.hpp"

namespace geartrain {

// Streams whose completed writes a shard keeps: the last that wrote.
inline constexpr size_t kMaxStreams = 65'536;
// Names kept of forgotten streams: their writes are refused, as they may be repetitions.
inline constexpr size_t kMaxForgottenStreams = 4 * kMaxStreams;

// Whether a stream belongs to a job: "a/b/c" does to "a", "a/b" and "a/b/c".
bool belongs_to(std::string_view stream, std::string_view job);

// A write that was applied.
struct CompletedWrite {
  int64_t sequence = 0;
  int64_t created = 0;
  std::string table;
};

// Table of writes: one object for all of them, so that a drop reaches them all.
struct WrittenTable {
  std::string name;
  bool is_dropped = false;
};

// State of a stream at one moment, for snapshots. Read by any thread: the name of a table does not change.
struct HeldStream {
  struct Write {
    int64_t sequence, created;
    std::shared_ptr<const WrittenTable> table;
  };
  std::string name;
  int64_t incarnation = 0;
  int64_t oldest_unacknowledged = 0;
  std::vector<Write> done;
};

// State of a stream, as snapshots store it.
struct StreamWrites {
  int64_t incarnation = 0;
  int64_t oldest_unacknowledged = 0;
  std::vector<CompletedWrite> done;
};

// A shard's state of its writers. Used by the thread with the shard's turn; memory is bounded by streams x window.
class CompletedWrites {
 public:
  explicit CompletedWrites(size_t max_streams = kMaxStreams, size_t max_forgotten = kMaxForgottenStreams);

  // Returns whether the write is new: then `applied` or `failed` completes it. A duplicate of an applied write is
  // completed here; a duplicate of one in flight joins it. Throws the Fault StaleClient if the caller was superseded,
  // InvalidArgument if the write has no name, or numbers out of range.
  bool admit(const CallContext& context, Completion completion);
  // Records the write to `table`, and completes it for all that wait for it.
  void applied(const CallContext& context, const Done& done, std::string_view table);
  // Completes it with `fault` for all that wait; the write left no trace and may be sent again.
  void failed(const CallContext& context, const Fault& fault);
  // Records that the rows of these writes are gone: a repeated one is refused, instead of counting as applied.
  void dropped(std::string_view table);

  // Refuses later writes of a job's streams with a lower incarnation. Idempotent. With `forget` also forgets those,
  // once. None of their writes may be waiting. Throws the Fault StaleClient if the caller was superseded,
  // InvalidArgument if the fence has no name.
  void fence(const std::string& job, int64_t incarnation, bool forget);
  // Throws the Fault StaleClient if the caller has a name and was superseded.
  void require_current(const CallContext& context) const;
  // Throws the Fault InvalidArgument if an incarnation leaves too few above it, or is far beyond the scheduler's:
  // streams that it fences off could never come back. `of_whom`: its owner.
  void require_possible(const std::string& of_whom, int64_t incarnation) const;
  // Records the highest incarnation that the scheduler has assigned. Any thread.
  void hear_given(int64_t incarnation) { given_ = std::max<int64_t>(given_, incarnation); }
  // Announces writes to `table`: their marks then need only the memory of `admit`.
  void expect(std::string_view table) { table_of(table); }

  // State of each stream that wrote to one of `tables`, with its writes to them.
  std::vector<HeldStream> streams(const std::vector<std::string>& tables) const;
  // Merges a state from `streams` into a stream that wrote to `tables`: the higher incarnation holds. If the job has
  // gone back under a lower incarnation than `marked` has, the numbers are another cluster's: they fence off no stream
  // here, and are forgotten when the job goes back again. Acknowledgements from before the stream was forgotten here do
  // not apply to later numbers. Numbers out of range are skipped.
  void restore(const std::string& name, StreamWrites marked, const std::vector<std::string>& tables);

  // Highest of all streams and jobs seen so far. Any thread.
  int64_t highest_incarnation() const { return highest_incarnation_; }
  size_t num_forgotten_streams() const { return forgotten_streams_.size(); }

 private:
  using Table = WrittenTable;
  struct Applied {
    int64_t incarnation = 0;
    int64_t created = 0;
    std::shared_ptr<const Table> table;
  };
  struct Waiting {
    std::vector<Completion> completions;
    // Memory of its mark, allocated before a row changes: rows without a mark would be changed again.
    std::map<int64_t, Applied>::node_type mark;
  };
  struct Stream {
    int64_t incarnation = 0;
    int64_t oldest_unacknowledged = 0;
    int64_t acknowledged_by = 0;  // incarnation that acknowledged them
    std::map<int64_t, Applied> done;
    std::map<int64_t, Waiting> waiting;
    std::vector<std::shared_ptr<const Table>> tables;  // tables ever written to, by address; some may be dropped
  };
  using Streams = RecencyMap<Stream>;

  Streams::Entry& current(const CallContext& context);
  Streams::Entry& begin(const std::string& name);
  Streams::Entry& waiting_stream(const CallContext& context);
  Waiting taken(Streams::Entry& entry, int64_t sequence);
  std::shared_ptr<const Table> table_of(std::string_view name);
  void require_current(const std::string& name, int64_t incarnation) const;
  bool is_possible(int64_t incarnation) const;
  void forget_before(Streams::Entry& entry, int64_t incarnation);
  static void note_table(Stream& stream, const std::shared_ptr<const Table>& table);
  static void forget_acknowledged(Stream& stream, int64_t oldest_unacknowledged, int64_t incarnation);
  void note(int64_t incarnation);

  const size_t max_streams_, max_forgotten_;
  Streams streams_;                        // held: those with a write in flight, which are never forgotten
  RecencyMap<int64_t> forgotten_streams_;  // their last incarnation
  ByName<std::shared_ptr<Table>> tables_;
  ByName<int64_t> fences_;     // lowest incarnation that may write, by job
  // incarnation below which the writes of a job were forgotten last: a repeated fence must spare those
  ByName<int64_t> forgotten_;
                               // restored since
  std::atomic<int64_t> highest_incarnation_{0}, given_{0};
};

}  // namespace geartrain
