// Momentum that moves every row at every step, applied to a row when it is next read or written (Optimizer::drift).
//
// A step without a gradient is linear:  v' = mu v + lambda w;  w' = w - lr v'.  So the effect of k steps on a row is
// one 2 x 2 matrix, shared by all of its columns, and by all rows of the same last step. Scalars are float64.
//
// A row's last step is a number: kResting (v is 0 and lambda is 0: nothing moves it), 0 (as the table began, v is 0),
// or the step that it was last caught up to; now + 1 after a gradient of the step that has not ended yet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "optimizers/optimizer.hpp"
#include "values/kernels.hpp"

namespace geartrain {

inline constexpr int64_t kResting = -1;

// Remembered steps of a table: the number of ended steps, the learning rates of the last ones, and the joint effect of
// all on a row that was never written.
struct StepState {
  int64_t now = 0;
  std::vector<float> lrs;  // learning rates of the steps now - lrs.size() + 1 .. now
  double origin_ww = 1, origin_vw = 0;
};

// Throws std::invalid_argument unless a table can have made such steps.
void require_steps(const StepState& state);

class StepHistory {
 public:
  explicit StepHistory(Drift drift) : momentum_(drift.momentum), weight_decay_(drift.weight_decay) {}

  int64_t now() const { return now_; }
  bool moves_rows_at_rest() const { return weight_decay_ != 0; }
  // Returns the effect of all steps since the table began on a row that began with v = 0.
  Elapsed origin() const { return origin_; }
  // First step whose learning rate is remembered; now + 1: none is.
  int64_t first() const { return now_ - static_cast<int64_t>(lrs_.size()) + 1; }
  // Returns the matrix of a step from `first` to `now`.
  Elapsed step(int64_t step) const;

  // Reserves memory for one more step. Throws std::bad_alloc, and then nothing has changed.
  void reserve() { lrs_.reserve(lrs_.size() + 1 > lrs_.capacity() ? 2 * lrs_.size() + 1 : 0); }
  void end_step(float lr);
  // Forgets steps before `step`.
  void forget_before(int64_t step);

  StepState state() const;
  void adopt(const StepState& state);

 private:
  double momentum_;
  double weight_decay_;
  int64_t now_ = 0;
  std::vector<float> lrs_;  // learning rates of the steps first .. now
  Elapsed origin_{1, 0, 0, 1};
};

// Returns the effect of `first`, then `second`.
Elapsed then(const Elapsed& first, const Elapsed& second);

// Effect of the steps up to now on rows of different last steps. Costs a matrix product per step back to the oldest
// row.
class CatchUp {
 public:
  explicit CatchUp(const StepHistory& history);

  // Extends it to rows as old as `last`; to be called before `of` such a row.
  void reach_back(int64_t last);
  // Returns the effect on a row; null: it is up to date.
  const Elapsed* of(int64_t last) const {
    if (last < 0 || last >= now_) return nullptr;
    if (last == 0) return origin_moves_ ? &origin_ : nullptr;
    // Rows of a damaged snapshot may be older than all remembered steps.
    return &by_age_[std::min(static_cast<size_t>(now_ - last), by_age_.size() - 1)];
  }
  int64_t now() const { return now_; }
  const Elapsed& origin() const { return origin_; }
  // Effects by now() - last, of all ages reached; the first moves nothing.
  const std::vector<Elapsed>& by_age() const { return by_age_; }
  // Largest magnitudes over all rows that can have been reached.
  Elapsed largest() const;

 private:
  const StepHistory& history_;
  int64_t now_;
  Elapsed origin_;
  bool origin_moves_;
  std::vector<Elapsed> by_age_;
};

}  // namespace geartrain
