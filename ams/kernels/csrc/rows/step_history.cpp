#include "rows/step_history.hpp"

#include <cmath>
#include <stdexcept>

namespace geartrain {
namespace {

// A diverging table ends at the range of its storage type, not in infinity minus infinity: products with float32 values
// stay finite below this.
constexpr double kLargestFactor = 1e250;

double bounded(double factor) { return std::clamp(factor, -kLargestFactor, kLargestFactor); }

}  // namespace

void require_steps(const StepState& state) {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
  };
  require(state.now >= 0 && static_cast<int64_t>(state.lrs.size()) <= state.now,
          "there must be at most one learning rate per step");
  for (float lr : state.lrs) require(std::isfinite(lr) && lr >= 0, "learning rates must be finite and >= 0");
  require(std::isfinite(state.origin_ww) && std::isfinite(state.origin_vw), "factors must be finite");
}

Elapsed then(const Elapsed& first, const Elapsed& second) {
  return {bounded(second.ww * first.ww + second.wv * first.vw), bounded(second.ww * first.wv + second.wv * first.vv),
          bounded(second.vw * first.ww + second.vv * first.vw), bounded(second.vw * first.wv + second.vv * first.vv)};
}

Elapsed StepHistory::step(int64_t step) const {
  const double lr = lrs_[static_cast<size_t>(step - first())];
  return {1.0 - lr * weight_decay_, -(lr * momentum_), weight_decay_, momentum_};
}

void StepHistory::end_step(float lr) {
  lrs_.push_back(lr);
  ++now_;
  origin_ = then(origin_, step(now_));
}

void StepHistory::forget_before(int64_t step) {
  const int64_t past = std::clamp<int64_t>(step - first(), 0, static_cast<int64_t>(lrs_.size()));
  lrs_.erase(lrs_.begin(), lrs_.begin() + past);
}

StepState StepHistory::state() const { return {now_, lrs_, origin_.ww, origin_.vw}; }

void StepHistory::adopt(const StepState& state) {
  now_ = state.now;
  lrs_ = state.lrs;
  origin_ = {state.origin_ww, 0, state.origin_vw, 1};
}

CatchUp::CatchUp(const StepHistory& history)
    : history_(history),
      now_(history.now()),
      origin_(history.origin()),
      origin_moves_(history.moves_rows_at_rest()),
      by_age_{{1, 0, 0, 1}} {
  origin_.wv = 0;
  origin_.vv = 0;
}

void CatchUp::reach_back(int64_t last) {
  if (last <= 0) return;
  for (int64_t step = now_ - static_cast<int64_t>(by_age_.size()) + 1; step > last && step >= history_.first(); --step)
    by_age_.push_back(then(history_.step(step), by_age_.back()));
}

Elapsed CatchUp::largest() const {
  Elapsed largest{std::fabs(origin_.ww), 0, std::fabs(origin_.vw), 0};
  for (const Elapsed& elapsed : by_age_)
    largest = {std::max(largest.ww, std::fabs(elapsed.ww)), std::max(largest.wv, std::fabs(elapsed.wv)),
               std::max(largest.vw, std::fabs(elapsed.vw)), std::max(largest.vv, std::fabs(elapsed.vv))};
  return largest;
}

}  // namespace geartrain
