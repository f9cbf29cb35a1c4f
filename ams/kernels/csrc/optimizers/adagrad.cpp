#include <algorithm>
#include <cmath>

#include "machine/isa.hpp"
#include "optimizers/optimizer.hpp"
#include "values/largest.hpp"

namespace geartrain {
namespace {

struct AdagradFactors {
  float scale, weight_decay;
  float step_size;  // lr / (1 + (t - 1) * lr_decay)
  float initial, epsilon;
};

GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict total,
                                        const float* __restrict gradient, size_t count, const AdagradFactors& factors) {
  const AdagradFactors f = factors;
  Largest largest_row, largest_total;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * f.scale + f.weight_decay * row[i];
    const float sum = total[i] + direction * direction;
    const float weight = row[i] - f.step_size * (direction / (std::sqrt(f.initial + sum) + f.epsilon));
    total[i] = sum;
    row[i] = weight;
    largest_row.see(weight);
    largest_total.see(sum);
  }
  return {largest_row.value(), {largest_total.value()}};
}

// Duchi, Hazan and Singer, "Adaptive subgradient methods" (JMLR 2011), as in torch.optim.Adagrad. The slot is the sum
// of squares without its initial value.
class Adagrad final : public Optimizer {
 public:
  explicit Adagrad(const OptimizerScalars& scalars)
      : lr_decay_(scalars.rate("lr_decay")),
        weight_decay_(static_cast<float>(scalars.rate("weight_decay"))),
        initial_(static_cast<float>(scalars.rate("initial_accumulator_value"))),
        epsilon_(scalars.epsilon("eps")),
        update_(Versions<&update_body>::pick(active_isa())) {}

  int num_slots() const override { return 1; }
  bool counts_updates() const override { return lr_decay_ != 0; }
  bool takes_narrow_slots() const override { return false; }

  Magnitudes update(float* row, float* total, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t t) const override {
    return update_(row, total, gradient, dim, {push.scale, weight_decay_, step_size(push.lr, t), initial_, epsilon_});
  }

  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override {
    const float direction = gradient + weight_decay_ * before.row;
    // A direction is divided by at least its own magnitude; if its square is no normal number, by at least epsilon.
    const float quotient = std::max(2.0f, 0x1p-63f / epsilon_);
    return {before.row + push.lr * quotient, {before.slots[0] + direction * direction}};
  }

 private:
  float step_size(float lr, int64_t t) const {
    if (lr_decay_ == 0) return lr;  // same value, without a division
    return static_cast<float>(static_cast<double>(lr) / (1 + static_cast<double>(t - 1) * lr_decay_));
  }

  using Update = Magnitudes (*)(float*, float*, const float*, size_t, const AdagradFactors&);
  double lr_decay_;
  float weight_decay_, initial_, epsilon_;
  Update update_;
};

}  // namespace

std::shared_ptr<Optimizer> make_adagrad(const OptimizerScalars& scalars) { return std::make_shared<Adagrad>(scalars); }

}  // namespace geartrain
