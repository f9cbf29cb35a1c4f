// Every optimizer of rows: one line of GEARTRAIN_OPTIMIZERS each.
#include <cmath>
#include <stdexcept>

#include "base/text.hpp"
#include "optimizers/optimizer.hpp"

#define GEARTRAIN_OPTIMIZERS(each) \
  each(sgd)                        \
  each(momentum)                   \
  each(sparse_momentum)            \
  each(adam)                       \
  each(adagrad)                    \
  each(adamw)                      \
  each(rowwise_adagrad)            \
  each(rowwise_adam)               \
  each(rmsprop)                    \
  each(ftrl)

namespace geartrain {

#define GEARTRAIN_DECLARE(name) std::shared_ptr<Optimizer> make_##name(const OptimizerScalars& scalars);
GEARTRAIN_OPTIMIZERS(GEARTRAIN_DECLARE)
#undef GEARTRAIN_DECLARE

namespace {

struct Entry {
  const char* name;
  std::shared_ptr<Optimizer> (*make)(const OptimizerScalars& scalars);
};

#define GEARTRAIN_ENTRY(name) {#name, &make_##name},
constexpr Entry kOptimizers[] = {GEARTRAIN_OPTIMIZERS(GEARTRAIN_ENTRY)};
#undef GEARTRAIN_ENTRY

std::invalid_argument outside(const char* name, double value, const char* range) {
  return std::invalid_argument(std::string(name) + " is " + shown(value) + "; it must " + range);
}

}  // namespace

double OptimizerScalars::at(const char* name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) throw std::invalid_argument(std::string("the optimizer needs a value of ") + name);
  return found->second;
}

double OptimizerScalars::rate(const char* name) const {
  const double value = at(name);
  if (!std::isfinite(value) || value < 0) throw outside(name, value, "be finite and >= 0");
  return value;
}

double OptimizerScalars::decay(const char* name) const {
  const double value = at(name);
  if (!(value >= 0 && value < 1)) throw outside(name, value, "lie in [0, 1)");
  return value;
}

bool OptimizerScalars::flag(const char* name) const {
  const double value = at(name);
  if (value != 0 && value != 1) throw outside(name, value, "be 0 or 1");
  return value != 0;
}

float OptimizerScalars::epsilon(const char* name) const {
  const float value = static_cast<float>(rate(name));
  if (!std::isnormal(value)) throw outside(name, at(name), "lie in [1.2e-38, 1.7e38)");
  return value;
}

std::shared_ptr<Optimizer> make_optimizer(const std::string& name, const OptimizerScalars& scalars) {
  for (const Entry& entry : kOptimizers)
    if (name == entry.name) return entry.make(scalars);
  throw std::invalid_argument("there is no optimizer " + name);
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kOptimizers) names.emplace_back(entry.name);
  return names;
}

}  // namespace geartrain
