// Adam on the rows of a push: algorithm 1 of Kingma and Ba, "Adam: A method for stochastic optimization" (ICLR 2015),
// with weight decay in the gradient as in torch.optim.Adam. A row's t is the number of its own updates.
#pragma once

#include "optimizers/optimizer.hpp"

namespace geartrain {

// Factors of one update: the same for all columns of a row, and for all rows with as many updates.
struct AdamFactors {
  float scale, weight_decay;
  float beta1, rest1;  // rest = 1 - beta
  float beta2, rest2;
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float step_size;     // lr / (1 - beta1^t)
  float epsilon;
};

// In float32 and in this order:
//   g = gradient * scale + weight_decay * row;  first = beta1 * first + rest1 * g;  second = beta2 * second + rest2 * g
// * g;
//   row -= step_size * (first / (sqrt(second) * inverse_root + epsilon))
class Adam : public Optimizer {
 public:
  // `weight_decay`: of the gradient.
  Adam(const OptimizerScalars& scalars, float weight_decay);

  int num_slots() const override { return 2; }
  bool counts_updates() const override { return true; }
  bool takes_narrow_slots() const override { return false; }
  Magnitudes update(float* row, float* moments, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t t) const override;
  // Loose for rows of float16, whose pushes are nearly always rehearsed: the move of a row depends on its own second
  // moments.
  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override;

 protected:
  AdamFactors factors_of(const PushFactors& push, int64_t t) const;
  // Factors with which a row moves furthest, for moments of any size.
  AdamFactors largest_factors(const PushFactors& push) const { return factors_of(push, 1 - beta1_, 1); }

 private:
  AdamFactors factors_of(const PushFactors& push, double correction1, double correction2) const;

  using Update = Magnitudes (*)(float*, float*, float*, const float*, size_t, const AdamFactors&);
  double beta1_, beta2_;
  float epsilon_, weight_decay_;
  Update update_;
};

}  // namespace geartrain
