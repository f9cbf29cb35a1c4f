#include <cmath>

#include "machine/isa.hpp"
#include "optimizers/optimizer.hpp"
#include "values/largest.hpp"
#include "values/mean_square.hpp"

namespace geartrain {
namespace {

struct RowWiseFactors {
  float scale, weight_decay;
  float step_size;  // lr / (1 + (t - 1) * lr_decay)
  float initial, epsilon;
};

GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict total,
                                        const float* __restrict gradient, size_t count, const RowWiseFactors& factors) {
  const RowWiseFactors f = factors;
  const auto direction = [&](size_t i) { return gradient[i] * f.scale + f.weight_decay * row[i]; };
  const float sum = *total + mean_square(count, direction);
  const float inverse = 1.0f / (std::sqrt(f.initial + sum) + f.epsilon);
  Largest largest_row, largest_sum;
  for (size_t i = 0; i < count; ++i) {
    const float weight = row[i] - f.step_size * (direction(i) * inverse);
    row[i] = weight;
    largest_row.see(weight);
  }
  *total = sum;
  largest_sum.see(sum);
  return {largest_row.value(), {largest_sum.value()}};
}

// Adagrad with one sum a row, over the means of its squared gradients: rowwise_adagrad of FBGEMM, RowWiseAdagrad of
// TorchRec (which also has lr_decay and initial_accumulator_value). The slot is the sum without its initial value.
class RowWiseAdagrad final : public Optimizer {
 public:
  explicit RowWiseAdagrad(const OptimizerScalars& scalars)
      : lr_decay_(scalars.rate("lr_decay")),
        weight_decay_(static_cast<float>(scalars.rate("weight_decay"))),
        initial_(static_cast<float>(scalars.rate("initial_accumulator_value"))),
        epsilon_(scalars.epsilon("eps")),
        update_(Versions<&update_body>::pick(active_isa())) {}

  int num_slots() const override { return 1; }
  int num_row_slots() const override { return 1; }
  bool counts_updates() const override { return lr_decay_ != 0; }
  bool takes_narrow_slots() const override { return false; }

  Magnitudes update(float* row, float* total, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t t) const override {
    const double step_size = static_cast<double>(push.lr) / (1 + static_cast<double>(t - 1) * lr_decay_);
    return update_(row, total, gradient, dim,
                   {push.scale, weight_decay_, static_cast<float>(step_size), initial_, epsilon_});
  }

  Magnitudes worst(float gradient, size_t dim, const PushFactors& push, const Magnitudes& before) const override {
    const float direction = gradient + weight_decay_ * before.row;
    return {before.row + push.lr * worst_quotient(dim, 1, epsilon_),
            {before.slots[0] + worst_mean_square(direction, dim)}};
  }

 private:
  using Update = Magnitudes (*)(float*, float*, const float*, size_t, const RowWiseFactors&);
  double lr_decay_;
  float weight_decay_, initial_, epsilon_;
  Update update_;
};

}  // namespace

std::shared_ptr<Optimizer> make_rowwise_adagrad(const OptimizerScalars& scalars) {
  return std::make_shared<RowWiseAdagrad>(scalars);
}

}  // namespace geartrain
