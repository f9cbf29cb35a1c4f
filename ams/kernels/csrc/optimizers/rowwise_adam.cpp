#include <cmath>

#include "machine/isa.hpp"
#include "optimizers/adam.hpp"
#include "values/largest.hpp"
#include "values/mean_square.hpp"

namespace geartrain {
namespace {

GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict first, float* __restrict second,
                                        const float* __restrict gradient, size_t count, const AdamFactors& factors,
                                        float kept) {
  const AdamFactors f = factors;
  const auto direction = [&](size_t i) { return gradient[i] * f.scale; };
  const float square = f.beta2 * *second + f.rest2 * mean_square(count, direction);
  const float inverse = 1.0f / (std::sqrt(square) * f.inverse_root + f.epsilon);
  Largest largest_row, largest_first, largest_second;
  for (size_t i = 0; i < count; ++i) {
    const float mean = f.beta1 * first[i] + f.rest1 * direction(i);
    const float weight = row[i] * kept - f.step_size * (mean * inverse);
    first[i] = mean;
    row[i] = weight;
    largest_row.see(weight);
    largest_first.see(mean);
  }
  *second = square;
  largest_second.see(square);
  return {largest_row.value(), {largest_first.value(), largest_second.value()}};
}

// Adam with one second moment a row, of the means of its squared gradients: partial_rowwise_adam of FBGEMM, whose
// weight decay is no part of the gradient. As in adam.hpp, a row's t is the number of its own updates.
class RowWiseAdam final : public Adam {
 public:
  explicit RowWiseAdam(const OptimizerScalars& scalars)
      : Adam(scalars, 0.0f),
        decay_(scalars.rate("weight_decay")),
        update_(Versions<&update_body>::pick(active_isa())) {}

  int num_row_slots() const override { return 1; }

  Magnitudes update(float* row, float* moments, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t t) const override {
    return update_(row, moments, moments + dim, gradient, dim, factors_of(push, t), kept(push));
  }

  Magnitudes worst(float gradient, size_t dim, const PushFactors& push, const Magnitudes& before) const override {
    const AdamFactors most = largest_factors(push);
    const float first = most.beta1 * before.slots[0] + most.rest1 * gradient;
    const float second = most.beta2 * before.slots[1] + most.rest2 * worst_mean_square(gradient, dim);
    return {before.row * std::fabs(kept(push)) + most.step_size * (first * (1.0f / most.epsilon)), {first, second}};
  }

 private:
  float kept(const PushFactors& push) const { return static_cast<float>(1 - static_cast<double>(push.lr) * decay_); }

  using Update = Magnitudes (*)(float*, float*, float*, const float*, size_t, const AdamFactors&, float);
  double decay_;
  Update update_;
};

}  // namespace

std::shared_ptr<Optimizer> make_rowwise_adam(const OptimizerScalars& scalars) {
  return std::make_shared<RowWiseAdam>(scalars);
}

}  // namespace geartrain
