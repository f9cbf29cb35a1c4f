#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "given_rows.hpp"
#include "module.hpp"
#include "rounding.hpp"

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

int64_t update_checked(const MatrixOutput& rows, int dtype_code, const std::optional<MatrixOutput>& slots, int slot_dtype_code,
                       const std::optional<IdOutput>& updates, const std::optional<IdArray>& numbers, const FloatRows& gradients,
                       int64_t first_id, uint64_t seed, uint32_t table_hash, int rule, float lr, float scale, float momentum,
                       float weight_decay, double beta1, double beta2, float epsilon) {
  require(rule >= 0 && rule < kNumRules, "rule must be 0 (SGD), 1 (momentum), 2 (nesterov) or 3 (adam)");
  const bool is_adam = rule == static_cast<int>(Rule::adam);
  require((rule == static_cast<int>(Rule::sgd)) == !slots.has_value(), "SGD has no slots, the others do");
  const DType dtype = checked_dtype(rows, dtype_code);
  const DType slot_dtype = slots ? checked_dtype(*slots, slot_dtype_code) : DType::float32;
  require(!slots || (slots->shape(0) == rows.shape(0) && slots->shape(1) == (is_adam ? 2 : 1) * rows.shape(1)),
          "slots must be shaped as the rows, of adam twice as wide");
  require(!is_adam || slot_dtype == DType::float32, "slots of adam must be float32");
  const bool counts = is_adam || dtype != DType::float32 || slot_dtype != DType::float32;
  require(counts == updates.has_value(), "updates must be given for adam and for 16 bits, and only for those");
  require(!updates || updates->size() == rows.shape(0), "updates must be as many as rows");
  const size_t count = numbers ? numbers->size() : rows.shape(0);
  require(gradients.shape(0) == count && gradients.shape(1) == rows.shape(1), "gradients must be [N, D]");
  nb::gil_scoped_release release;
  if (numbers) require_within(*numbers, rows.shape(0));
  const GivenRows given{static_cast<char*>(rows.data()), slots ? static_cast<char*>(slots->data()) : nullptr,
                        updates ? updates->data() : nullptr, static_cast<int64_t>(rows.shape(1)), dtype, slot_dtype,
                        first_id, rounding_key(seed, table_hash)};
  const GivenStep step{static_cast<Rule>(rule), {lr, scale, momentum, weight_decay}, {beta1, beta2, epsilon}};
  return update_rows(given, numbers ? numbers->data() : nullptr, static_cast<int64_t>(count), gradients.data(), step);
}

}  // namespace

void bind_given_rows(nb::module_& m) {
  m.def("gather_rows", &gather_checked, nb::arg("rows").noconvert(), nb::arg("numbers").noconvert(), nb::arg("out").noconvert());
  m.def("update_rows", &update_checked, nb::kw_only(), nb::arg("rows").noconvert(), nb::arg("dtype"),
        nb::arg("slots").noconvert().none(), nb::arg("slot_dtype"), nb::arg("updates").noconvert().none(),
        nb::arg("numbers").noconvert().none(), nb::arg("gradients").noconvert(), nb::arg("first_id"), nb::arg("seed"),
        nb::arg("table_hash"), nb::arg("rule"), nb::arg("lr"), nb::arg("scale"), nb::arg("momentum"), nb::arg("weight_decay"),
        nb::arg("beta1"), nb::arg("beta2"), nb::arg("epsilon"));
}

}  // namespace geartrain
