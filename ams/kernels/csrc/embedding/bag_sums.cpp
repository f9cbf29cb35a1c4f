#include "embedding/bag_sums.hpp"

#include <algorithm>

#include "base/common.hpp"

namespace geartrain {
namespace {

void add_scaled(float* sum, const float* values, int64_t dim, float factor) {
  for (int64_t d = 0; d < dim; ++d) sum[d] += values[d] * factor;
}

// Calls visit(bag, place, weight) for all places, in order.
template <class Visit>
void for_each(const RowBags& bags, const Visit& visit) {
  int64_t i = 0;
  for (int64_t bag = 0; bag < bags.bags; ++bag)
    for (const int64_t end = i + bags.counts[bag]; i < end; ++i)
      visit(bag, static_cast<int64_t>(bags.places[i]), bags.weights == nullptr ? 1.0f : bags.weights[i]);
}

}  // namespace

bool RowBags::is_sound() const {
  int64_t total = 0;
  for (int64_t bag = 0; bag < bags; ++bag) {
    if (counts[bag] < 0) return false;
    total += counts[bag];
  }
  return total == count &&
         std::all_of(places, places + count, [&](int32_t place) { return place >= 0 && place < num_rows; });
}

void pool_bags(const RowBags& bags, const float* rows, int64_t dim, float* sums) {
  const DefaultFloatMode float_mode;
  std::fill_n(sums, bags.bags * dim, 0.0f);
  for_each(bags, [&](int64_t bag, int64_t place, float weight) {
    add_scaled(sums + bag * dim, rows + place * dim, dim, weight);
  });
}

void spread_bags(const RowBags& bags, const float* vectors, int64_t dim, float* gradients) {
  const DefaultFloatMode float_mode;
  std::fill_n(gradients, bags.num_rows * dim, 0.0f);
  for_each(bags, [&](int64_t bag, int64_t place, float weight) {
    add_scaled(gradients + place * dim, vectors + bag * dim, dim, weight);
  });
}

}  // namespace geartrain
