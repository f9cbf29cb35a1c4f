// Momentum in the form of torch.optim.SGD.
#pragma once

#include "optimizers/optimizer.hpp"

namespace geartrain {

// d = g + weight_decay * w;  v = momentum * v + d;  w -= lr * v, with nesterov w -= lr * (d + momentum * v).
class Momentum : public Optimizer {
 public:
  Momentum(const OptimizerScalars& scalars, bool nesterov);

  int num_slots() const override { return 1; }
  Magnitudes update(float* row, float* slot, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t t) const override;
  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override;

 protected:
  using Update = Magnitudes (*)(float*, float*, const float*, size_t, PushFactors, Drift);
  Drift factors_;
  bool nesterov_;
  Update update_;
};

}  // namespace geartrain
