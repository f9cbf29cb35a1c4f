// Every optimizer of rows: one line of GEARTRAIN_OPTIMIZERS each.
#include <stdexcept>

#include "optimizers/optimizer.hpp"

#define GEARTRAIN_OPTIMIZERS(each) \
  each(sgd)                        \
  each(momentum)                   \
  each(sparse_momentum)            \
  each(adam)                       \
  each(adagrad)                    \
  each(adamw)

namespace geartrain {

#define GEARTRAIN_DECLARE(name) std::shared_ptr<Optimizer> make_##name(const Scalars& scalars);
GEARTRAIN_OPTIMIZERS(GEARTRAIN_DECLARE)
#undef GEARTRAIN_DECLARE

namespace {

struct Entry {
  const char* name;
  std::shared_ptr<Optimizer> (*make)(const Scalars& scalars);
};

#define GEARTRAIN_ENTRY(name) {#name, &make_##name},
constexpr Entry kOptimizers[] = {GEARTRAIN_OPTIMIZERS(GEARTRAIN_ENTRY)};
#undef GEARTRAIN_ENTRY

}  // namespace

double Scalars::wide(const char* name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) throw std::invalid_argument(std::string("the optimizer needs a number ") + name);
  return found->second;
}

std::shared_ptr<Optimizer> make_optimizer(const std::string& name, const Scalars& scalars) {
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
