// Table of a shard's engine: its rows, the optimizers of its pushes, and whether it may be read and written now.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "calls/call.hpp"
#include "optimizers/optimizer.hpp"
#include "store/row_store.hpp"

namespace geartrain {

// Returns the fault for a refusal of rows of table `name`: at index refusal.index is `value` (an id or a position).
// `label` names the rows, or, for a row that overflows the type it is pulled as, that type.
Fault fault_of(const Refusal& refusal, int64_t value, const std::string& name, const RowStoreSpec& spec,
               const std::string& label);

// Optimizer of a table, and those that its pushes may name instead: of the same kind with other numbers.
class PushOptimizers {
 public:
  // `fixed` has the reasons for the numbers that cannot change.
  PushOptimizers(std::string name, std::map<std::string, double> scalars, std::map<std::string, std::string> fixed,
                 std::shared_ptr<const Optimizer> own);

  // Returns the optimizer, as RowOptimizerSpec.for_push. Throws the Fault InvalidArgument. Used by one thread at a
  // time.
  const Optimizer& of_push(const Scalars& scalars);

 private:
  std::string name_;
  std::map<std::string, double> scalars_;
  std::map<std::string, std::string> fixed_;
  std::shared_ptr<const Optimizer> own_;
  Scalars last_scalars_;  // pushes of one step name the same
  std::shared_ptr<const Optimizer> last_;
};

// Used by the thread that has the shard's turn.
class ServedTable {
 public:
  ServedTable(std::string name, int64_t incarnation, std::shared_ptr<RowStore> rows, double lr,
              PushOptimizers optimizers, bool is_open);

  // Sets altered numbers of its optimizer, for its pushes from now on.
  void alter(double lr, PushOptimizers optimizers) { lr_ = lr, optimizers_ = std::move(optimizers); }
  // Throws the Fault TableNotFound if the caller expects another table of the name; 0: any.
  void require_meant(int64_t incarnation) const;
  // Throws the Fault TableBeingRestored, or as require_meant.
  void require_open(int64_t meant_incarnation) const;
  // Throws the Fault InternalError if its rows are torn.
  void require_whole() const;

  // Pull, push and assign as RowTable in Python. Throw Faults, and std::bad_alloc: no row has changed then. `pauses`:
  // see RowStore.
  void pull(const PullRequest& request, Pauses* pauses = nullptr) const;
  // `after`: destination of the updated rows, or null.
  int64_t push(const PushRequest& request, Pauses* pauses = nullptr, const RowPlaces<char>* after = nullptr);
  // Checks of `push` that need neither ids nor gradients.
  void require_factors(const PushRequest& request) const;
  void require_width(const char* label, int64_t dim) const;
  int64_t assign(const AssignRequest& request, Pauses* pauses = nullptr);

  // Histogram of the writes applied between pull and push, of pushes that say when their rows were pulled: at i numbers
  // of i bits: none, 1, 2 to 3, 4 to 7, ... Since it was made here.
  using Staleness = std::array<int64_t, 64>;
  const Staleness& staleness() const { return staleness_; }
  // Called before the push counts as a write.
  void note_staleness(const BatchFacts& batch);

  const std::string& name() const { return name_; }
  const RowStore& rows() const { return *rows_; }

  bool is_open;      // not being restored, and published
  std::string torn;  // why its rows are inconsistent, if a write was cut off; else empty
  int64_t writes = 0;         // since it was made here
  int64_t writes_before = 0;  // those of the snapshot that it was restored from
  int64_t evicted = 0;        // rows evicted up to the end of the last write
  int64_t created = 0;        // rows created by pushes and assigns since it was made here
  int64_t all_writes() const { return writes_before + writes; }

  // Clock of the next expiry scan, by the steps and times of pushes.
  int64_t expiry_step = INT64_MAX, expiry_seconds = INT64_MAX;
  bool is_expiry_due() const {
    if (expiry_step == INT64_MAX && expiry_seconds == INT64_MAX) return false;
    const LifeClock clock = rows_->clock();
    const auto has_come = [](int64_t now, int64_t due) { return due != INT64_MAX && now >= due; };
    return has_come(clock.step, expiry_step) || has_come(clock.seconds, expiry_seconds);
  }

 private:
  void require_dtype(const char* label, DType dtype) const;
  void require_wire(const PullRequest& request) const;

  const std::string name_;
  const int64_t incarnation_;
  const std::shared_ptr<RowStore> rows_;
  double lr_;
  PushOptimizers optimizers_;
  Staleness staleness_{};
};

}  // namespace geartrain
