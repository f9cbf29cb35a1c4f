#include "given_rows.hpp"

#include <algorithm>
#include <vector>

#include "lookahead.hpp"

namespace geartrain {

void gather_rows(const float* rows, int64_t dim, const int64_t* numbers, int64_t count, float* out) {
  const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
  const Lookahead lookahead;
  lookahead.each(
      count, bytes, [&](int64_t i) { lookahead.ask(Use::read, rows + numbers[i] * dim, bytes); },
      [&](int64_t i) { std::copy_n(rows + numbers[i] * dim, dim, out + i * dim); });
}

int64_t update_rows(float* rows, float* slots, int64_t dim, const int64_t* numbers, int64_t count, const float* gradients,
                    Rule rule, StepFactors factors) {
  DefaultFloatMode float_mode;
  const auto update = kernels().update[static_cast<int>(rule)];
  const size_t width = static_cast<size_t>(dim);
  std::vector<float> row(width), slot(width);
  int64_t refused = 0;
  const auto place = [&](int64_t i) { return (numbers != nullptr ? numbers[i] : i) * dim; };
  const Lookahead lookahead;
  const size_t bytes = width * sizeof(float);
  lookahead.each(
      count, slots != nullptr ? 2 * bytes : bytes,
      [&](int64_t i) {
        lookahead.ask(Use::update, rows + place(i), bytes);
        if (slots != nullptr) lookahead.ask(Use::update, slots + place(i), bytes);
      },
      [&](int64_t i) {
        const int64_t at = place(i);
        std::copy_n(rows + at, dim, row.data());
        if (slots != nullptr) std::copy_n(slots + at, dim, slot.data());
        const Largest largest = update(row.data(), slot.data(), gradients + i * dim, width, factors);
        if (largest.row >= kInfinityBits || (slots != nullptr && largest.slot >= kInfinityBits)) {
          ++refused;
          return;
        }
        std::copy_n(row.data(), dim, rows + at);
        if (slots != nullptr) std::copy_n(slot.data(), dim, slots + at);
      });
  return refused;
}

}  // namespace geartrain
