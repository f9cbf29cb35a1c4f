// Row store of a table on a shard: its memory, initial values, and pull, push and assign.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "admission/admission.hpp"
#include "base/common.hpp"
#include "base/row_places.hpp"
#include "calls/call.hpp"
#include "index/bits.hpp"
#include "index/directory.hpp"
#include "index/slabs.hpp"
#include "machine/lookahead.hpp"
#include "machine/pauses.hpp"
#include "optimizers/optimizer.hpp"
#include "moments/frozen_rows.hpp"
#include "moments/moments.hpp"
#include "rows/row_life.hpp"
#include "rows/step_history.hpp"
#include "values/initial_values.hpp"
#include "values/kernels.hpp"
#include "values/rounding.hpp"

namespace geartrain {

struct RowStoreSpec {
  int64_t dim;
  DType dtype;
  DType slot_dtype;
  std::shared_ptr<const Optimizer> optimizer;
  InitialValues initial;
  std::vector<int64_t> owned_buckets;  // ascending
  int64_t num_rows;                    // -1: hashed
  int64_t threads;                     // most threads on one request
  int64_t window;                      // where untouched rows move: steps after which a row is caught up at the latest
  bool counts_occurrences = false;     // whether pushes carry the occurrences of each id in their batch
  AdmissionSpec admission = {};        // its key and is_dense are those of the table
  bool keeps_lives = false;            // whether it records when each row was last pushed, and how often
  int64_t max_bytes = -1;              // limit of the rows of a hashed table with lives, -1: none
  std::string name = {};               // for errors

  // Numbers of a row's slots, one slot after the other.
  int64_t slot_dim() const { return static_cast<int64_t>(optimizer->slot_dim(static_cast<size_t>(dim))); }
  // Whether rows move at steps that do not touch them.
  bool counts_steps() const { return optimizer->drift().has_value(); }
  // Whether an update is rounded to fewer bits than it was computed in.
  bool rounds() const {
    return dtype != DType::float32 || (optimizer->num_slots() > 0 && slot_dtype != DType::float32);
  }
  bool counts_updates() const { return optimizer->counts_updates() || (rounds() && !counts_steps()); }
};

// Optimizer and factors of a push.
struct PushStep {
  const Optimizer& optimizer;  // the table's, or one of its kind with other numbers
  PushFactors factors;
  BatchFacts batch = {};
};

// Shapes: N ids, D = dim. Every refusal (Refusal, std::bad_alloc) leaves rows and slots unchanged, and comes before the
// first change of a row. With `pauses` a large request is done in blocks: between two of them other threads may pull,
// and see each row as before or as after. The shard's thread is the only writer; the lock only protects memory from a
// second thread's mistake.
class RowStore {
 public:
  explicit RowStore(const RowStoreSpec& spec);

  // Adopts settings of `to` that may change in an existing table: the optimizer's numbers, initial values of absent
  // rows, admission (a new rule counts anew), whether lives are kept, max_bytes. Returns the number of rows evicted for
  // want of room; -1: not now, as a freeze holds another admission's counts, or rows with lives or without. Throws
  // std::bad_alloc.
  int64_t alter(const RowStoreSpec& to);

  struct PullInto {
    RowPlaces<char> rows;  // [M, D]
    uint8_t* present;      // [M] or null
    int64_t size;          // M
    // Type of `rows`, and the type the numbers are rounded to: the table's own; or, for a float32 table, a `wire` of 16
    // bits with `dtype` that or float32.
    DType dtype;
    DType wire;
  };
  using Gradients = RowPlaces<const char>;  // [N, D]
  // Reads rows; creates none: a missing row reads as its initial value. Refuses rows that overflow `wire`.
  void pull(const int64_t* ids, int64_t count, const PullInto& out, Pauses* pauses = nullptr) const;
  // Number of values of a row's state: the row, its slots, its number of updates (the bits of an int64 in two), and 1
  // if it exists, else 0. 0: there is no such state, as rows and slots are not both float32, or untouched rows move.
  int64_t state_width() const;
  // Writes the states [N, state_width()], from which the result of a push for each row follows. One block for all.
  void pull_states(const int64_t* ids, int64_t count, const RowPlaces<char>& out) const;
  // Applies gradients; returns the number of rows created. Ids without a row that the table does not admit get none:
  // their gradients are dropped, and counted. `ends_step`: where untouched rows move, the rows without a push in this
  // step move. `after`: destination of the updated rows [N, D] in the table's dtype, or null; null where the table
  // counts steps, whose end may move them.
  int64_t push(const int64_t* ids, int64_t count, const Gradients& gradients, DType dtype, const PushStep& step,
               bool ends_step, Pauses* pauses = nullptr, const RowPlaces<char>* after = nullptr);
  // Refuses as a push of these would; changes nothing.
  void check_push(const int64_t* ids, int64_t count, const Gradients& gradients, DType dtype,
                  const PushStep& step) const;
  // Returns whether no push of gradients of at most `largest` in magnitude can be refused for its values.
  bool cannot_overflow(float largest, const PushStep& step) const;
  // Reserves the memory of missing rows.
  void make_room(const int64_t* ids, int64_t count);
  // Reserves the memory that a step of `count` written rows takes beside them: old rows copied for a freeze, and, where
  // untouched rows move, those of the sweep.
  void make_room_to_keep(int64_t count);
  // Overwrites rows, of the table's dtype; their slots become zero. Returns the number of rows created.
  int64_t assign(const int64_t* ids, int64_t count, const char* rows, Pauses* pauses = nullptr);
  // Removes rows: they read as never written. Ids may repeat, or have no row. Returns the number of removed rows.
  int64_t remove(const int64_t* ids, int64_t count);

  // Freezes the rows, or only those written since a known moment: they can be read from here on while writes go on.
  // Returns their number; latest_moment() is the moment then. One freeze at a time.
  int64_t freeze(std::optional<int64_t> since);
  bool is_frozen() const;
  // Copies up to `most` frozen rows that were not read yet: ids [most], rows [most, D], and, unless null, slots [most,
  // slot_dim] and row steps [most] (last steps where untouched rows move, or update counts). They are copied as stored,
  // not caught up. Only rows of `buckets` ([kNumBuckets], 0 where not wanted; null: all), in order of position. Returns
  // their number; -1: all were read. Visits a bounded number of rows, so that writers do not wait for long: it may
  // return fewer than there are, or 0.
  int64_t read_frozen(int64_t most, const uint8_t* buckets, int64_t* ids, char* rows, char* slots, int64_t* steps,
                      RowLife* lives = nullptr);
  // Copies ids of rows that existed at the requested moment and had been removed by the freeze; one that has a row
  // again may be among them. None for a freeze of all rows. Copies up to `most`, from number `from` on; returns how
  // many.
  int64_t read_frozen_removed(int64_t from, int64_t most, int64_t* ids) const;
  // Ends the freeze. Unless the rows are `kept`, its moment is forgotten.
  void thaw(bool kept);
  // Moments for `freeze`, by number: those noted here and of freezes, until they are forgotten; 0 is the construction
  // of the store.
  int64_t record_moment();
  int64_t latest_moment() const;
  bool knows_moment(int64_t moment) const;
  void forget_moment(int64_t moment);
  // Counts of admission at the moment of the freeze; none if the table admits every id.
  const std::optional<Admission::State>& frozen_admission() const { return frozen_admission_; }
  // Admission with its counts of refused ids; null: the table admits every id.
  const Admission* admission() const { return admission_.get(); }
  // Adopts a range of admission counts, or, with a number below 0, only the number of pushes; see Admission::restore.
  void restore_admission(int64_t num_pushes, int64_t range, const char* bytes, int64_t num_waiting);
  // Writes frozen rows with their slots; they do not count as written since any moment. Returns the number created. If
  // they do not fit, the first in the order of eviction are skipped, or evicted.
  int64_t restore(const int64_t* ids, int64_t count, const char* rows, const char* slots, const int64_t* steps,
                  const RowLife* lives = nullptr);
  // Steps that the last steps of `restore` count in. Adopted once all rows are restored.
  StepState step_state() const;
  void adopt_steps(const StepState& state);

  // Functions of tables that keep lives (row_store_life.cpp).
  LifeClock clock() const;
  void advance_clock(const LifeClock& clock);
  // Largest advance of each number of the clock by one push, while there were other rows, since the last call.
  LifeClock pop_leap();
  // Copies ids and lives of up to `most` rows from a position on, in order of position; returns how many, and moves
  // `position` on, to -1 once there are no more.
  int64_t read_lives(int64_t& position, int64_t most, int64_t* ids, RowLife* lives) const;
  // Most rows under max_bytes, INT64_MAX without; and the number of evicted rows.
  int64_t max_rows() const { return max_rows_; }
  int64_t num_evicted() const;
  // Whether some rows are older than the table's lives: theirs begin with its clock. Adopted before the clock of a
  // restore, without effect on a table without lives.
  bool has_undated() const { return has_undated_; }
  void adopt_undated() { has_undated_ = lives_.has_value(); }

  int64_t num_present() const;
  int64_t memory_bytes() const;
  // Parts of that memory: rows, slots and lives; the index of ids; old rows and moments of snapshots.
  struct MemoryParts {
    int64_t rows, slots, index, snapshots;
  };
  MemoryParts memory_parts() const;
  const RowStoreSpec& spec() const { return spec_; }
  size_t row_bytes() const { return static_cast<size_t>(rows_.item_bytes()); }

 private:
  // Catch-up of all rows of one request; none unless untouched rows move.
  using Now = std::optional<CatchUp>;
  struct Resolved {
    std::vector<int64_t> positions;  // -1: missing
    std::vector<int64_t> missing;
    uint32_t largest = 0;  // bits of the largest |value| beside the ids
  };

  void require_legal(const int64_t* ids, int64_t count) const;
  Resolved resolve(const int64_t* ids, int64_t count, const RowPlaces<const char>& values, DType dtype,
                   Pauses* pauses = nullptr) const;
  Resolved resolve_push(const int64_t* ids, int64_t count, const Gradients& gradients, DType dtype,
                        const PushStep& step, Now& now, Pauses* pauses = nullptr) const;
  void reserve(const std::vector<int64_t>& missing);
  void write_initial(char* row, int64_t id, float* buffer) const;
  bool none_overflows(float largest_gradient, const PushStep& step, const Now& now) const;
  void rehearse(const int64_t* ids, const Resolved& found, const Gradients& gradients, DType dtype,
                const PushStep& step, const Now& now) const;
  void pull_slice(const int64_t* ids, int64_t begin, int64_t end, const PullInto& out, bool streamed) const;
  void require_within(DType wire, const int64_t* ids, int64_t count) const;
  const float* wide_row(int64_t item, int64_t id, const Now& now, float* buffer) const;
  int64_t create_missing(const int64_t* ids, int64_t* positions, int64_t count, float* buffer);
  template <class Write>
  int64_t write_blocks(const int64_t* ids, Resolved& found, float* buffer, const Write& write, Pauses* pauses);
  void update_one(int64_t item, int64_t id, const char* gradient, DType dtype, const PushStep& step, const Now& now,
                  float* buffer, Magnitudes& bounds);
  void ask_for(const Lookahead& lookahead, int64_t item) const;
  // Returns the item of the row at a position: rows of dense tables move in memory, positions do not. -1 for -1.
  int64_t item_at(int64_t position) const {
    return items_ != nullptr && position >= 0 ? items_->at(position) : position;
  }
  int64_t& row_step(int64_t item) const { return *reinterpret_cast<int64_t*>(row_steps_->at(item)); }
  // Returns the number of a row; 0 for an absent one (-1), or where nothing is counted.
  int64_t number_of(int64_t item) const { return row_steps_ && item >= 0 ? row_step(item) : 0; }
  Draw draw_of(int64_t id, int64_t number, Part part) const { return {rounding_key_, id, number, part}; }
  Ranges ranges() const { return {largest_of(spec_.dtype), largest_of(spec_.slot_dtype)}; }

  // Functions for tables whose untouched rows move (row_store_elapsed.cpp); elsewhere they do nothing.
  Now now() const { return steps_ ? Now(*steps_) : std::nullopt; }
  void reach_back(Now& now, const int64_t* items, int64_t count) const;
  std::vector<int64_t> items_at(const std::vector<int64_t>& positions) const;
  Magnitudes bounds_at(const Now& now) const;
  // Returns whether the row of `item` (-1: absent) must be caught up.
  bool is_behind(const Now& now, int64_t item) const { return now && now->of(number_of(item)) != nullptr; }
  void pull_moved(char* out, int64_t item, int64_t id, const CatchUp& catch_up, float* buffer) const;
  std::optional<int64_t> number_when_assigned() const;
  struct Overdue {
    std::vector<int64_t> positions;
    int64_t sweep_at = 0;  // next position of the sweep
  };
  int64_t rows_of_a_sweep(int64_t count) const;
  void reserve_step() {
    if (steps_) steps_->reserve();
  }
  Overdue next_overdue(Now& now);
  void end_step(const Overdue& overdue, const Now& now, float lr, float* buffer);
  void bring_up(const Overdue& overdue, const CatchUp& catch_up, float* buffer);
  int64_t next_present(int64_t from) const;
  int64_t num_rows_there() const;
  void before_writes(const std::vector<int64_t>& positions, Pauses* pauses = nullptr);
  void ensure_item(int64_t item, NewMemory& news);
  void copy_item(int64_t to, int64_t from);
  void clear_item(int64_t item);
  void copy_for_freeze(const std::vector<int64_t>& positions, Pauses* pauses = nullptr);
  size_t aside_bytes() const { return row_bytes() + slot_bytes() + step_bytes() + life_bytes(); }
  template <class AnyDirectory>
  int64_t frozen_id(const AnyDirectory& directory, int64_t position, const char* aside) const;
  int64_t remove_rows(const int64_t* ids, int64_t count);
  RowLife& life_at(int64_t item) const { return *reinterpret_cast<RowLife*>(lives_->at(item)); }
  void note_seen(const std::vector<int64_t>& positions, const BatchFacts& batch, bool counts);
  int64_t bytes_of_rows(int64_t count) const;
  int64_t max_rows_within(int64_t bytes) const;
  void make_way(const Resolved& found);
  void evict(int64_t count, const std::vector<int64_t>& kept);
  SlabArray new_lives() const;
  void date_rows(const LifeClock& before);
  std::vector<Candidate> first_to_go(int64_t count, const std::vector<int64_t>& kept,
                                     std::vector<Candidate> others = {});
  std::vector<size_t> that_fit(const int64_t* ids, const Resolved& found, const RowLife* lives);
  size_t slot_bytes() const { return slots_ ? static_cast<size_t>(slots_->item_bytes()) : 0; }
  size_t step_bytes() const { return row_steps_ ? sizeof(int64_t) : 0; }
  size_t life_bytes() const { return lives_ ? sizeof(RowLife) : 0; }

  RowStoreSpec spec_;
  int num_slots_;    // slots of the optimizer
  size_t slot_dim_;  // spec_.slot_dim()
  uint64_t rounding_key_;
  Directory directory_;
  DenseItems* items_;  // the directory's; null: hashed, the item of a position is the position
  SlabArray rows_;     // these three by item
  std::optional<SlabArray> slots_;
  std::optional<SlabArray> row_steps_;  // int64: last step where untouched rows move, else the number of updates
  std::optional<SlabArray> lives_;      // RowLife, by item
  LifeClock clock_, leap_;
  bool has_undated_ = false;
  int64_t max_rows_ = INT64_MAX, num_evicted_ = 0;
  std::optional<StepHistory> steps_;
  int64_t sweep_at_ = 0;     // next position of the sweep for old rows
  int64_t sweep_began_ = 0;  // step at which the sweep was at position 0
  Magnitudes bounds_;        // bounds of all rows and slots, tight enough to prove that a push cannot overflow
  bool bounds_lag_ = false;  // whether a push has written rows that they do not cover yet
  Moments moments_;
  bool has_removed_ = false;              // whether there are places of removed rows
  std::unique_ptr<Admission> admission_;  // null: admits every id
  std::optional<Admission::State> frozen_admission_;
  std::optional<FrozenRows> frozen_;
  int64_t frozen_at_ = Moments::kNone;     // moment of `frozen_`
  std::optional<SlabArray> room_;  // memory of old rows of the last freeze
  int64_t room_items_ = 0;         // items of that memory that were ever used
  mutable std::shared_mutex mutex_;
};

}  // namespace geartrain
