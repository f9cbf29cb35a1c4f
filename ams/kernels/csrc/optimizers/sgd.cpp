#include "machine/isa.hpp"
#include "optimizers/optimizer.hpp"
#include "values/largest.hpp"

namespace geartrain {
namespace {

GEARTRAIN_INLINE float update_body(float* __restrict row, const float* __restrict gradient, size_t count,
                                   PushFactors push, float weight_decay) {
  const auto [lr, scale] = push;
  Largest largest;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * scale + weight_decay * row[i];
    const float weight = row[i] - lr * direction;
    row[i] = weight;
    largest.see(weight);
  }
  return largest.value();
}

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const OptimizerScalars& scalars) : weight_decay_(static_cast<float>(scalars.rate("weight_decay"))) {}

  int num_slots() const override { return 0; }

  Magnitudes update(float* row, float*, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t) const override {
    return {update_(row, gradient, dim, push, weight_decay_), {}};
  }

  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override {
    const float direction = gradient + weight_decay_ * before.row;
    return {before.row + push.lr * direction, {}};
  }

 private:
  float weight_decay_;
  decltype(Versions<&update_body>::pick(Isa::baseline)) update_ = Versions<&update_body>::pick(active_isa());
};

}  // namespace

std::shared_ptr<Optimizer> make_sgd(const OptimizerScalars& scalars) { return std::make_shared<Sgd>(scalars); }

}  // namespace geartrain
