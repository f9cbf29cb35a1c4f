#include <algorithm>
#include <cmath>

#include "machine/isa.hpp"
#include "optimizers/optimizer.hpp"
#include "values/largest.hpp"
#include "values/mean_square.hpp"

namespace geartrain {
namespace {

struct RmsFactors {
  float lr, scale, weight_decay;
  float alpha, rest;  // rest = 1 - alpha
  float momentum, epsilon;
};

// Slots: velocity with momentum, average gradient if centered, average square.
template <bool centered, bool has_momentum>
GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict slots,
                                        const float* __restrict gradient, size_t count, const RmsFactors& factors) {
  const RmsFactors f = factors;
  float* __restrict velocities = slots;
  float* __restrict means = slots + (has_momentum ? count : 0);
  float* __restrict squares = means + (centered ? count : 0);
  Largest largest_row, largest_velocity, largest_mean, largest_square;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * f.scale + f.weight_decay * row[i];
    const float square = f.alpha * squares[i] + f.rest * direction * direction;
    float variance = square;
    if constexpr (centered) {
      const float mean = f.alpha * means[i] + f.rest * direction;
      variance = std::max(square - mean * mean, 0.0f);
      means[i] = mean;
      largest_mean.see(mean);
    }
    float step = direction / (std::sqrt(variance) + f.epsilon);
    if constexpr (has_momentum) {
      step = f.momentum * velocities[i] + step;
      velocities[i] = step;
      largest_velocity.see(step);
    }
    const float weight = row[i] - f.lr * step;
    squares[i] = square;
    row[i] = weight;
    largest_square.see(square);
    largest_row.see(weight);
  }
  Magnitudes largest{largest_row.value(), {}};
  auto slot = largest.slots.begin();
  if constexpr (has_momentum) *slot++ = largest_velocity.value();
  if constexpr (centered) *slot++ = largest_mean.value();
  *slot = largest_square.value();
  return largest;
}

// Tieleman and Hinton, lecture 6.5 (2012), as in torch.optim.RMSprop.
class RmsProp final : public Optimizer {
 public:
  explicit RmsProp(const OptimizerScalars& scalars)
      : alpha_(scalars.decay("alpha")),
        momentum_(static_cast<float>(scalars.decay("momentum"))),
        weight_decay_(static_cast<float>(scalars.rate("weight_decay"))),
        epsilon_(scalars.epsilon("eps")),
        centered_(scalars.flag("centered")),
        has_momentum_(scalars.decay("momentum") != 0),
        update_(centered_ ? (has_momentum_ ? version<true, true>() : version<true, false>())
                          : (has_momentum_ ? version<false, true>() : version<false, false>())) {}

  int num_slots() const override { return 1 + centered_ + has_momentum_; }
  bool takes_narrow_slots() const override { return false; }

  Magnitudes update(float* row, float* slots, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t) const override {
    return update_(row, slots, gradient, dim, factors_of(push));
  }

  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override {
    const RmsFactors f = factors_of(push);
    const float direction = gradient + f.weight_decay * before.row;
    float step = centered_ ? direction / f.epsilon : worst_quotient(1, f.rest, f.epsilon);
    Magnitudes after;
    size_t slot = 0;
    if (has_momentum_) {
      step += f.momentum * before.slots[slot];
      after.slots[slot++] = step;
    }
    if (centered_) {
      const float mean = f.alpha * before.slots[slot] + f.rest * direction;
      after.slots[slot++] = std::isfinite(mean * mean) ? mean : INFINITY;
    }
    after.slots[slot] = f.alpha * before.slots[slot] + f.rest * direction * direction;
    after.row = before.row + f.lr * step;
    return after;
  }

 private:
  using Update = Magnitudes (*)(float*, float*, const float*, size_t, const RmsFactors&);

  template <bool centered, bool has_momentum>
  static Update version() {
    return Versions<&update_body<centered, has_momentum>>::pick(active_isa());
  }

  RmsFactors factors_of(const PushFactors& push) const {
    return {push.lr,   push.scale, weight_decay_, static_cast<float>(alpha_), static_cast<float>(1 - alpha_),
            momentum_, epsilon_};
  }

  double alpha_;
  float momentum_, weight_decay_, epsilon_;
  bool centered_, has_momentum_;
  Update update_;
};

}  // namespace

std::shared_ptr<Optimizer> make_rmsprop(const OptimizerScalars& scalars) { return std::make_shared<RmsProp>(scalars); }

}  // namespace geartrain
