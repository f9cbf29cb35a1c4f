#include "optimizers/momentum.hpp"

namespace geartrain {
namespace {

// Rows that a step does not touch move by their momentum (see step_history.hpp), so this equals dense momentum.
class ElapsedMomentum final : public Momentum {
 public:
  explicit ElapsedMomentum(const OptimizerScalars& scalars) : Momentum(scalars, false) {}

  std::optional<Drift> drift() const override { return factors_; }

  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override {
    const float direction = gradient + factors_.weight_decay * before.row;
    const float velocity = before.slots[0] + direction;  // a second gradient of a step is added to the whole slot
    return {before.row + push.lr * velocity, {velocity}};
  }
};

}  // namespace

std::shared_ptr<Optimizer> make_sparse_momentum(const OptimizerScalars& scalars) {
  if (scalars.flag("elapsed")) return std::make_shared<ElapsedMomentum>(scalars);
  return std::make_shared<Momentum>(scalars, false);
}

}  // namespace geartrain
