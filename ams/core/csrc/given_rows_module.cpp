#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "given_rows.hpp"
#include "module.hpp"

namespace geartrain {
namespace {

using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_within(const IdArray& numbers, size_t num_rows) {
  const auto [low, high] = std::minmax_element(numbers.data(), numbers.data() + numbers.size());
  require(numbers.size() == 0 || (*low >= 0 && *high < static_cast<int64_t>(num_rows)), "a number lies outside the rows");
}

void gather_checked(const FloatRows& rows, const IdArray& numbers, const FloatRows& out) {
  require(out.shape(0) == numbers.size() && out.shape(1) == rows.shape(1), "out must be [N, D]");
  nb::gil_scoped_release release;
  require_within(numbers, rows.shape(0));
  gather_rows(rows.data(), static_cast<int64_t>(rows.shape(1)), numbers.data(), static_cast<int64_t>(numbers.size()), out.data());
}

int64_t update_checked(const FloatRows& rows, const std::optional<FloatRows>& slots, const std::optional<IdArray>& numbers,
                       const FloatRows& gradients, int rule, float lr, float scale, float momentum, float weight_decay) {
  require(rule >= 0 && rule < kNumPlainRules, "rule must be 0 (SGD), 1 (momentum) or 2 (nesterov)");
  require((rule == static_cast<int>(Rule::sgd)) == !slots.has_value(), "SGD has no slots, the others do");
  require(!slots || (slots->shape(0) == rows.shape(0) && slots->shape(1) == rows.shape(1)), "slots must be shaped as the rows");
  const size_t count = numbers ? numbers->size() : rows.shape(0);
  require(gradients.shape(0) == count && gradients.shape(1) == rows.shape(1), "gradients must be [N, D]");
  nb::gil_scoped_release release;
  if (numbers) require_within(*numbers, rows.shape(0));
  return update_rows(rows.data(), slots ? slots->data() : nullptr, static_cast<int64_t>(rows.shape(1)),
                     numbers ? numbers->data() : nullptr, static_cast<int64_t>(count), gradients.data(), static_cast<Rule>(rule),
                     {lr, scale, momentum, weight_decay});
}

}  // namespace

void bind_given_rows(nb::module_& m) {
  m.def("gather_rows", &gather_checked, nb::arg("rows").noconvert(), nb::arg("numbers").noconvert(), nb::arg("out").noconvert());
  m.def("update_rows", &update_checked, nb::arg("rows").noconvert(), nb::arg("slots").noconvert().none(),
        nb::arg("numbers").noconvert().none(), nb::arg("gradients").noconvert(), nb::arg("rule"), nb::arg("lr"),
        nb::arg("scale"), nb::arg("momentum"), nb::arg("weight_decay"));
}

}  // namespace geartrain
