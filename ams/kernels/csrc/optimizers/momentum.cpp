#include "optimizers/momentum.hpp"

#include "machine/isa.hpp"
#include "values/largest.hpp"

namespace geartrain {
namespace {

template <bool nesterov>
GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict slot, const float* __restrict gradient,
                                        size_t count, PushFactors push, Drift factors) {
  const auto [lr, scale] = push;
  const auto [momentum, weight_decay] = factors;
  Largest largest_row, largest_slot;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * scale + weight_decay * row[i];
    const float velocity = momentum * slot[i] + direction;
    slot[i] = velocity;
    const float step = nesterov ? direction + momentum * velocity : velocity;
    const float weight = row[i] - lr * step;
    row[i] = weight;
    largest_slot.see(velocity);
    largest_row.see(weight);
  }
  return {largest_row.value(), {largest_slot.value()}};
}

}  // namespace

Momentum::Momentum(const OptimizerScalars& scalars, bool nesterov)
    : factors_{static_cast<float>(scalars.decay("momentum")), static_cast<float>(scalars.rate("weight_decay"))},
      nesterov_(nesterov),
      update_(nesterov ? Versions<&update_body<true>>::pick(active_isa())
                       : Versions<&update_body<false>>::pick(active_isa())) {}

Magnitudes Momentum::update(float* row, float* slot, const float* gradient, size_t dim, const PushFactors& push,
                            int64_t) const {
  return update_(row, slot, gradient, dim, push, factors_);
}

Magnitudes Momentum::worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const {
  const float direction = gradient + factors_.weight_decay * before.row;
  const float velocity = factors_.momentum * before.slots[0] + direction;
  const float step = nesterov_ ? direction + factors_.momentum * velocity : velocity;
  return {before.row + push.lr * step, {velocity}};
}

std::shared_ptr<Optimizer> make_momentum(const OptimizerScalars& scalars) {
  return std::make_shared<Momentum>(scalars, scalars.flag("nesterov"));
}

}  // namespace geartrain
