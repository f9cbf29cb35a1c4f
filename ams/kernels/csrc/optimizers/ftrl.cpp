#include <algorithm>
#include <cmath>

#include "machine/isa.hpp"
#include "optimizers/optimizer.hpp"
#include "values/largest.hpp"

namespace geartrain {
namespace {

struct FtrlFactors {
  float lr, scale;
  float beta, l1, l2;
};

// Least learning rate where a weight is divided by it.
constexpr float kSmallestRate = 0x1p-126f;

GEARTRAIN_INLINE Magnitudes update_body(float* __restrict row, float* __restrict held, float* __restrict squares,
                                        const float* __restrict gradient, size_t count, const FtrlFactors& factors) {
  const FtrlFactors f = factors;
  const float inverse = 1.0f / std::max(f.lr, kSmallestRate);
  Largest largest_row, largest_held, largest_square;
  for (size_t i = 0; i < count; ++i) {
    const float direction = gradient[i] * f.scale;
    const float square = squares[i] + direction * direction;
    const float root = f.beta + std::sqrt(square);
    const float rate = f.lr / root;
    const float pull = held[i] + direction;
    const float target = row[i] - rate * pull;
    const float size = std::fabs(target) - rate * f.l1;
    const bool is_zero = size <= 0.0f;
    const float weight = is_zero ? 0.0f : std::copysign(size / (1.0f + rate * f.l2), target);
    const float rest = std::min(std::max(pull - row[i] * root * inverse, -f.l1), f.l1);
    const float balance = is_zero ? rest : -(f.l2 * weight + std::copysign(f.l1, target));
    squares[i] = square;
    held[i] = balance;
    row[i] = weight;
    largest_row.see(weight);
    largest_held.see(balance);
    largest_square.see(square);
  }
  return {largest_row.value(), {largest_held.value(), largest_square.value()}};
}

// FTRL-Proximal with learning rates per coordinate: McMahan et al., "Ad click prediction: a view from the trenches"
// (KDD 2013), algorithm 1, from any initial weight and with a learning rate for each push. The first slot is z + w /
// rate, which holds all of z beside the weight: -(l2 * w + l1 * sign(w)) for a weight other than 0, and a number within
// l1 of 0 for one that is 0.
class Ftrl final : public Optimizer {
 public:
  explicit Ftrl(const OptimizerScalars& scalars)
      : beta_(scalars.epsilon("beta")),
        l1_(static_cast<float>(scalars.rate("l1"))),
        l2_(static_cast<float>(scalars.rate("l2"))),
        update_(Versions<&update_body>::pick(active_isa())) {}

  int num_slots() const override { return 2; }
  bool takes_narrow_slots() const override { return false; }

  Magnitudes update(float* row, float* slots, const float* gradient, size_t dim, const PushFactors& push,
                    int64_t) const override {
    return update_(row, slots, slots + dim, gradient, dim, {push.lr, push.scale, beta_, l1_, l2_});
  }

  Magnitudes worst(float gradient, size_t, const PushFactors& push, const Magnitudes& before) const override {
    // A gradient is divided by at least its own magnitude; if its square is no normal number, by at least beta.
    const float quotient = std::max(2.0f, 0x1p-62f / beta_);
    const float row = before.row + push.lr * quotient + 2 * (push.lr / beta_) * before.slots[0];
    return {row, {l2_ * row + l1_, before.slots[1] + gradient * gradient}};
  }

 private:
  using Update = Magnitudes (*)(float*, float*, float*, const float*, size_t, const FtrlFactors&);
  float beta_, l1_, l2_;
  Update update_;
};

}  // namespace

std::shared_ptr<Optimizer> make_ftrl(const OptimizerScalars& scalars) { return std::make_shared<Ftrl>(scalars); }

}  // namespace geartrain
