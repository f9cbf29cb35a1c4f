#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "python/module.hpp"
#include "rows/array_update.hpp"
#include "values/rounding.hpp"

namespace geartrain {
namespace {

using FactorRows = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_within(const IdArray& numbers, size_t num_rows) {
  const auto [low, high] = std::minmax_element(numbers.data(), numbers.data() + numbers.size());
  require(numbers.size() == 0 || (*low >= 0 && *high < static_cast<int64_t>(num_rows)), "a number lies outside the rows");
}

void gather_checked(const FloatRows& rows, const IdArray& numbers, const FloatRows& out) {
  require(out.shape(0) == numbers.size() && out.shape(1) == rows.shape(1), "out must be [N, D]");
  WithoutInterpreter release;
  require_within(numbers, rows.shape(0));
  gather_rows(rows.data(), static_cast<int64_t>(rows.shape(1)), numbers.data(), static_cast<int64_t>(numbers.size()), out.data());
}

int64_t update_checked(const MatrixOutput& rows, int dtype_code, const std::optional<MatrixOutput>& slots, int slot_dtype_code,
                       const std::optional<IdOutput>& steps, const std::optional<IdArray>& numbers, const FloatRows& gradients,
                       int64_t first_id, uint64_t seed, uint32_t table_hash, const Optimizer& optimizer, float lr, float scale,
                       const CatchUp* catch_up) {
  require((optimizer.num_slots() > 0) == slots.has_value(), "slots must be given for an optimizer that has them, and only for those");
  const DType dtype = checked_dtype(rows, dtype_code);
  const DType slot_dtype = slots ? checked_dtype(*slots, slot_dtype_code) : DType::float32;
  require(!slots || (slots->shape(0) == rows.shape(0) && slots->shape(1) == optimizer.slot_dim(rows.shape(1))),
          "slots must be as many as the rows and as wide as the optimizer's, one after the other");
  require(slot_dtype == DType::float32 || optimizer.takes_narrow_slots(), "slots of this optimizer must be float32");
  require((catch_up != nullptr) == optimizer.drift().has_value(), "catch_up must be given where untouched rows move, and only there");
  const bool counts =
      optimizer.counts_updates() || dtype != DType::float32 || slot_dtype != DType::float32 || catch_up != nullptr;
  require(counts == steps.has_value(), "steps must be given where updates or steps are counted, and for 16 bits, and only there");
  require(!steps || steps->size() == rows.shape(0), "steps must be as many as rows");
  const size_t count = numbers ? numbers->size() : rows.shape(0);
  require(gradients.shape(0) == count && gradients.shape(1) == rows.shape(1), "gradients must be [N, D]");
  WithoutInterpreter release;
  if (numbers) require_within(*numbers, rows.shape(0));
  const ArrayUpdate given{static_cast<char*>(rows.data()), slots ? static_cast<char*>(slots->data()) : nullptr,
                        steps ? steps->data() : nullptr, static_cast<int64_t>(rows.shape(1)), dtype, slot_dtype,
                        first_id, rounding_key(seed, table_hash)};
  return update_rows(given, numbers ? numbers->data() : nullptr, static_cast<int64_t>(count), gradients.data(),
                     {optimizer, {lr, scale}, catch_up});
}

void read_checked(const MatrixOutput& rows, int dtype_code, const MatrixOutput& slots, int slot_dtype_code, const IdOutput& steps,
                  const std::optional<IdArray>& numbers, const CatchUp& catch_up, const FloatRows& out) {
  const DType dtype = checked_dtype(rows, dtype_code), slot_dtype = checked_dtype(slots, slot_dtype_code);
  require(slots.shape(0) == rows.shape(0) && slots.shape(1) == rows.shape(1), "slots must be shaped as the rows");
  require(steps.size() == rows.shape(0), "steps must be as many as rows");
  const size_t count = numbers ? numbers->size() : rows.shape(0);
  require(out.shape(0) == count && out.shape(1) == rows.shape(1), "out must be [N, D]");
  WithoutInterpreter release;
  if (numbers) require_within(*numbers, rows.shape(0));
  const ArrayUpdate given{static_cast<char*>(rows.data()), static_cast<char*>(slots.data()), steps.data(),
                        static_cast<int64_t>(rows.shape(1)), dtype, slot_dtype, 0, 0};
  read_rows(given, numbers ? numbers->data() : nullptr, static_cast<int64_t>(count), catch_up, out.data());
}

void create_history(StepHistory* self, const Optimizer& optimizer) {
  require(optimizer.drift().has_value(), "rows of this optimizer do not move at steps that do not touch them");
  new (self) StepHistory(*optimizer.drift());
}

void adopt(StepHistory& history, int64_t now, const std::vector<float>& lrs, double origin_ww, double origin_vw) {
  const StepState state{now, lrs, origin_ww, origin_vw};
  require_steps(state);
  history.adopt(state);
}

// [K + 1, 4]: by age, then what moves rows that were never written.
void copy_factors(const CatchUp& catch_up, const FactorRows& out) {
  const std::vector<Elapsed>& by_age = catch_up.by_age();
  require(out.shape(0) == by_age.size() + 1 && out.shape(1) == 4, "out must be [num_ages + 1, 4]");
  static_assert(sizeof(Elapsed) == 4 * sizeof(double));
  std::memcpy(out.data(), by_age.data(), by_age.size() * sizeof(Elapsed));
  std::memcpy(out.data() + 4 * by_age.size(), &catch_up.origin(), sizeof(Elapsed));
}

void bind_steps(nb::module_& m) {
  nb::class_<StepHistory>(m, "StepHistory")
      .def("__init__", &create_history, nb::arg("optimizer"))
      .def("end_step", &StepHistory::end_step, nb::arg("lr"))
      .def("forget_before", &StepHistory::forget_before, nb::arg("step"))
      .def("state", [](const StepHistory& history) {
        const StepState state = history.state();
        return nb::make_tuple(state.now, state.lrs, state.origin_ww, state.origin_vw);
      })
      .def("adopt", &adopt, nb::arg("now"), nb::arg("lrs"), nb::arg("origin_ww"), nb::arg("origin_vw"))
      .def_prop_ro("moves_rows_at_rest", &StepHistory::moves_rows_at_rest)
      .def_prop_ro("now", &StepHistory::now);
  nb::class_<CatchUp>(m, "CatchUp")
      .def("__init__", [](CatchUp* self, const StepHistory& history) { (new (self) CatchUp(history))->reach_back(1); },
           nb::arg("history"), nb::keep_alive<1, 2>())
      .def("copy_factors", &copy_factors, nb::arg("out").noconvert())
      .def_prop_ro("num_ages", [](const CatchUp& catch_up) { return catch_up.by_age().size(); })
      .def_prop_ro("now", &CatchUp::now);
}

}  // namespace

void bind_given_rows(nb::module_& m) {
  bind_steps(m);
  m.def("gather_rows", &gather_checked, nb::arg("rows").noconvert(), nb::arg("numbers").noconvert(), nb::arg("out").noconvert());
  m.def("update_rows", &update_checked, nb::kw_only(), nb::arg("rows").noconvert(), nb::arg("dtype"),
        nb::arg("slots").noconvert().none(), nb::arg("slot_dtype"), nb::arg("steps").noconvert().none(),
        nb::arg("numbers").noconvert().none(), nb::arg("gradients").noconvert(), nb::arg("first_id"), nb::arg("seed"),
        nb::arg("table_hash"), nb::arg("optimizer"), nb::arg("lr"), nb::arg("scale"), nb::arg("catch_up").none());
  m.def("read_rows", &read_checked, nb::kw_only(), nb::arg("rows").noconvert(), nb::arg("dtype"), nb::arg("slots").noconvert(),
        nb::arg("slot_dtype"), nb::arg("steps").noconvert(), nb::arg("numbers").noconvert().none(), nb::arg("catch_up"),
        nb::arg("out").noconvert());
}

}  // namespace geartrain
