#include "optimizers/adam.hpp"

#include <array>
#include <cmath>

#include "machine/isa.hpp"
#include "values/largest.hpp"

namespace geartrain {
namespace {

// By squaring, from products alone: std::pow rounds differently from one machine to the next.
double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0 && base != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return exponent > 0 ? 0 : result;
}

GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict first, float* __restrict second,
                                        const float* __restrict gradient, size_t count, const AdamFactors& factors) {
  const AdamFactors f = factors;
  Largest largest_row, largest_first, largest_second;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * f.scale + f.weight_decay * row[i];
    const float mean = f.beta1 * first[i] + f.rest1 * direction;
    const float square = f.beta2 * second[i] + f.rest2 * direction * direction;
    const float weight = row[i] - f.step_size * (mean / (std::sqrt(square) * f.inverse_root + f.epsilon));
    first[i] = mean;
    second[i] = square;
    row[i] = weight;
    largest_row.see(weight);
    largest_first.see(mean);
    largest_second.see(square);
  }
  return {largest_row.value(), {largest_first.value(), largest_second.value()}};
}

}  // namespace

Adam::Adam(const OptimizerScalars& scalars, float weight_decay)
    : beta1_(scalars.decay("beta1")),
      beta2_(scalars.decay("beta2")),
      epsilon_(scalars.epsilon("eps")),
      weight_decay_(weight_decay),
      update_(Versions<&update_body>::pick(active_isa())) {}

AdamFactors Adam::factors_of(const PushFactors& push, double correction1, double correction2) const {
  return {.scale = push.scale,
          .weight_decay = weight_decay_,
          .beta1 = static_cast<float>(beta1_),
          .rest1 = static_cast<float>(1 - beta1_),
          .beta2 = static_cast<float>(beta2_),
          .rest2 = static_cast<float>(1 - beta2_),
          .inverse_root = static_cast<float>(1 / std::sqrt(correction2)),
          .step_size = static_cast<float>(static_cast<double>(push.lr) / correction1),
          .epsilon = epsilon_};
}

AdamFactors Adam::factors_of(const PushFactors& push, int64_t t) const {
  // Rows of one push have few different numbers of updates, and two powers take longer than the rest of a short row.
  struct Corrections {
    double beta1 = 0, beta2 = 0;
    int64_t t = -1;
    double first = 0, second = 0;
  };
  thread_local std::array<Corrections, 256> recent;
  Corrections& known = recent[static_cast<size_t>(t) % recent.size()];
  if (known.t != t || known.beta1 != beta1_ || known.beta2 != beta2_)
    known = {beta1_, beta2_, t, 1 - power(beta1_, t), 1 - power(beta2_, t)};
  return factors_of(push, known.first, known.second);
}

Magnitudes Adam::update(float* row, float* moments, const float* gradient, size_t dim, const PushFactors& push,
                        int64_t t) const {
  return update_(row, moments, moments + dim, gradient, dim, factors_of(push, t));
}

Magnitudes Adam::worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const {
  const AdamFactors most = largest_factors(push);  // no row moves more than step_size * (first / epsilon)
  const float direction = gradient + most.weight_decay * before.row;
  const float first = most.beta1 * before.slots[0] + most.rest1 * direction;
  const float second = most.beta2 * before.slots[1] + most.rest2 * direction * direction;
  return {before.row + most.step_size * (first / most.epsilon), {first, second}};
}

std::shared_ptr<Optimizer> make_adam(const OptimizerScalars& scalars) {
  return std::make_shared<Adam>(scalars, static_cast<float>(scalars.rate("weight_decay")));
}

}  // namespace geartrain
