#include <cmath>

#include "optimizers/adam.hpp"

namespace geartrain {
namespace {

// Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2, as in torch.optim.AdamW: lr
// * weight decay of the row is subtracted before Adam's step, and is no part of its gradient.
class AdamW final : public Adam {
 public:
  explicit AdamW(const OptimizerScalars& scalars) : Adam(scalars, 0.0f), decay_(scalars.rate("weight_decay")) {}

  Magnitudes update(float* row, float* moments, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t t) const override {
    const float factor = kept(push);
    for (size_t i = 0; i < dim; ++i) row[i] *= factor;
    return Adam::update(row, moments, gradient, dim, push, t);
  }

  Magnitudes worst(float gradient, size_t dim, const PushFactors& push, const Magnitudes& before) const override {
    return Adam::worst(gradient, dim, push, {before.row * std::fabs(kept(push)), before.slots});
  }

 private:
  float kept(const PushFactors& push) const { return static_cast<float>(1 - static_cast<double>(push.lr) * decay_); }

  double decay_;
};

}  // namespace

std::shared_ptr<Optimizer> make_adamw(const OptimizerScalars& scalars) { return std::make_shared<AdamW>(scalars); }

}  // namespace geartrain
