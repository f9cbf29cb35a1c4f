#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "neighbours/neighbour_recall.hpp"
#include "neighbours/neighbours.hpp"
#include "neighbours/row_codes.hpp"
#include "neighbours/row_search.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

template <class Value, size_t N>
using Array = nb::ndarray<Value, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Rows = Array<const float, 2>;
using Ids32 = Array<const int32_t, 1>;

// Best neighbours so far of some rows, in arrays that Python owns and may save.
struct Best {
  Array<float, 2> scores;
  Array<int32_t, 2> ids;
  Array<int32_t, 1> counts;
  Array<float, 1> floors;
  Array<uint8_t, 1> locks;
  int64_t keep;

  int64_t rows() const { return static_cast<int64_t>(scores.shape(0)); }
  RunningBest view() const {
    return {scores.data(), ids.data(),   counts.data(),
            floors.data(), locks.data(), static_cast<int64_t>(scores.shape(1)),
            keep};
  }
};

// Reads a RunningBestArrays of ams/kernels/neighbours.py.
Best best_of(nb::handle arrays) {
  const auto scores = nb::cast<Array<float, 2>>(arrays.attr("scores"), false);
  const auto ids = nb::cast<Array<int32_t, 2>>(arrays.attr("ids"), false);
  const auto counts = nb::cast<Array<int32_t, 1>>(arrays.attr("counts"), false);
  const auto floors = nb::cast<Array<float, 1>>(arrays.attr("floors"), false);
  const auto locks = nb::cast<Array<uint8_t, 1>>(arrays.attr("locks"), false);
  const auto keep = nb::cast<int64_t>(arrays.attr("keep"));
  const size_t rows = scores.shape(0);
  require(ids.shape(0) == rows && ids.shape(1) == scores.shape(1), "ids must have the shape of scores");
  require(counts.size() == rows && floors.size() == rows && locks.size() == rows,
          "counts, floors, locks must be [rows]");
  require(keep >= 1 && keep < static_cast<int64_t>(scores.shape(1)), "keep must lie in [1, capacity)");
  for (size_t i = 0; i < rows; ++i)
    require(counts.data()[i] >= 0 && counts.data()[i] < static_cast<int64_t>(scores.shape(1)),
            "a count is out of range");
  return {scores, ids, counts, floors, locks, keep};
}

UnitRows checked_rows(const Rows& rows, const Ids32* ids, int64_t first) {
  const int64_t count = static_cast<int64_t>(rows.shape(0));
  require(ids == nullptr || ids->size() == rows.shape(0), "ids must name each row");
  require(first >= 0 && first + count <= int64_t{1} << 31, "class ids must fit into 31 bits");
  return {rows.data(), count, ids == nullptr ? nullptr : ids->data(), first};
}

// `given_b` None: b gets no results. A block with itself is multiplied once.
void pairs_checked(const Rows& a, int64_t first_a, nb::handle given_a, const Rows& b, int64_t first_b,
                   nb::handle given_b, int64_t threads) {
  const bool same = first_a == first_b && !given_b.is_none();
  require(a.shape(1) == b.shape(1), "both blocks must have the same width");
  require(!same || (a.data() == b.data() && a.shape(0) == b.shape(0)), "a and b must be the same block, as same says");
  const UnitRows rows_a = checked_rows(a, nullptr, first_a), rows_b = checked_rows(b, nullptr, first_b);
  const Best best_a = best_of(given_a), best_b = given_b.is_none() ? Best{} : best_of(given_b);
  require(best_a.rows() == static_cast<int64_t>(a.shape(0)), "best_a must have the rows of a");
  require(given_b.is_none() || best_b.rows() == static_cast<int64_t>(b.shape(0)), "best_b must have the rows of b");
  const RunningBest view_b = given_b.is_none() ? RunningBest{} : best_b.view();
  WithoutInterpreter release;
  recall_pairs(rows_a, best_a.view(), rows_b, view_b, static_cast<int64_t>(a.shape(1)), same, threads);
}

void strays_checked(const Rows& a, const Ids32& ids_a, nb::handle given_a, const Rows& b, int64_t first_b,
                    int64_t threads) {
  const Best best_a = best_of(given_a);
  require(a.shape(1) == b.shape(1) && best_a.rows() == static_cast<int64_t>(a.shape(0)), "shapes differ");
  const UnitRows rows_a = checked_rows(a, &ids_a, 0), rows_b = checked_rows(b, nullptr, first_b);
  WithoutInterpreter release;
  recall_pairs(rows_a, best_a.view(), rows_b, RunningBest{}, static_cast<int64_t>(a.shape(1)), false, threads);
}

void trim_checked(nb::handle given, int64_t threads) {
  const Best best = best_of(given);
  WithoutInterpreter release;
  trim_best(best.view(), best.rows(), threads);
}

int64_t unit_checked(const Array<float, 2>& rows, int64_t threads) {
  WithoutInterpreter release;
  return make_unit_rows(rows.data(), static_cast<int64_t>(rows.shape(0)), static_cast<int64_t>(rows.shape(1)), threads);
}

void require_counts(const Ids32& counts, size_t rows, size_t width) {
  require(counts.size() == rows, "counts must be [rows]");
  for (size_t i = 0; i < rows; ++i)
    require(counts.data()[i] >= 0 && static_cast<size_t>(counts.data()[i]) <= width, "a count is out of range");
}

void exact_checked(const Rows& a, const Array<const int32_t, 2>& ids, const Ids32& counts, const Rows& b,
                   int64_t first_b, const Array<double, 2>& scores, int64_t threads) {
  require(a.shape(1) == b.shape(1) && ids.shape(0) == a.shape(0), "shapes differ");
  require(scores.shape(0) == ids.shape(0) && scores.shape(1) == ids.shape(1), "scores must have the shape of ids");
  require_counts(counts, ids.shape(0), ids.shape(1));
  WithoutInterpreter release;
  exact_scores(a.data(), static_cast<int64_t>(a.shape(0)), static_cast<int64_t>(a.shape(1)), ids.data(), counts.data(),
               static_cast<int64_t>(ids.shape(1)), b.data(), first_b, static_cast<int64_t>(b.shape(0)), scores.data(),
               threads);
}

void best_checked(const Rows& a, const Ids32& ids_a, const Rows& b, int64_t first_b, const Array<double, 2>& scores,
                  const Array<int32_t, 2>& ids, const Array<int32_t, 1>& counts, int64_t threads) {
  require(a.shape(1) == b.shape(1) && scores.shape(0) == a.shape(0) && ids.shape(0) == a.shape(0), "shapes differ");
  require(scores.shape(1) == ids.shape(1) && counts.size() == a.shape(0), "scores, ids and counts differ");
  const int64_t k = static_cast<int64_t>(ids.shape(1));
  for (size_t i = 0; i < counts.size(); ++i)
    require(counts.data()[i] >= 0 && counts.data()[i] <= k, "a count is out of range");
  const UnitRows rows_a = checked_rows(a, &ids_a, 0), rows_b = checked_rows(b, nullptr, first_b);
  WithoutInterpreter release;
  exact_best(rows_a, rows_b, static_cast<int64_t>(a.shape(1)), k, scores.data(), ids.data(), counts.data(), threads);
}

void rank_checked(const Array<const double, 2>& scores, const Array<const int32_t, 2>& ids, const Ids32& counts,
                  const Array<const float, 1>& floors, double error_bound, const Array<int32_t, 2>& out,
                  const Array<uint8_t, 1>& accepted, int64_t threads) {
  const size_t rows = scores.shape(0), width = scores.shape(1);
  require(ids.shape(0) == rows && ids.shape(1) == width && floors.size() == rows,
          "ids must have the shape of scores, floors its rows");
  require(out.shape(0) == rows && accepted.size() == rows, "out must be [rows, k], accepted [rows]");
  require_counts(counts, rows, width);
  WithoutInterpreter release;
  rank_candidates(scores.data(), ids.data(), counts.data(), static_cast<int64_t>(width), floors.data(),
                  static_cast<int64_t>(rows), error_bound, static_cast<int64_t>(out.shape(1)), out.data(),
                  accepted.data(), threads);
}


template <class Id>
using Lists = nb::ndarray<const Id, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns (count or offending place, fault).
template <class Id>
nb::tuple select_checked(const IdArray& offsets, const Lists<Id>& ids, const IdArray& labels, int64_t budget,
                         uint64_t seed, uint64_t step, const IdOutput& out) {
  require(offsets.size() >= 2, "offsets must be [num_classes + 1]");
  const NeighbourLists<Id> table{offsets.data(), ids.data(), static_cast<int64_t>(offsets.size()) - 1,
                                 static_cast<int64_t>(ids.size())};
  const int64_t room = static_cast<int64_t>(out.size()), num_labels = static_cast<int64_t>(labels.size());
  require(budget >= 1 && room >= std::min(std::max(budget, num_labels), table.num_classes),
          "out must have room for the budget, or for all labels");
  Selected selected{};
  {
    WithoutInterpreter release;
    selected = select_neighbours(table, labels.data(), num_labels, budget, seed, step, out.data());
  }
  return nb::make_tuple(selected.count, static_cast<int>(selected.fault));
}

template <class Id>
void bind_select(nb::module_& m) {
  m.def("select_neighbours", &select_checked<Id>, nb::arg("offsets").noconvert(), nb::arg("ids").noconvert(),
        nb::arg("labels").noconvert(), nb::arg("budget"), nb::arg("seed"), nb::arg("step"), nb::arg("out").noconvert());
}

using Panels = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_panels(const Rows& rows, int64_t num_panels, int64_t bytes) {
  const int64_t dim = static_cast<int64_t>(rows.shape(1));
  require(dim >= 1 && dim <= kMaxColumns, "rows must have 1 to 65536 columns");
  require(rows.shape(0) < (size_t{1} << 31), "there are too many rows");
  require(num_panels == panels_of(static_cast<int64_t>(rows.shape(0))) && bytes == panel_bytes(dim),
          "panels must be [rows / 16, bytes of 16 rows]");
}

void encode_checked(const Rows& rows, const Array<uint8_t, 2>& panels, int64_t threads) {
  require_panels(rows, static_cast<int64_t>(panels.shape(0)), static_cast<int64_t>(panels.shape(1)));
  WithoutInterpreter release;
  encode_rows(rows.data(), static_cast<int64_t>(rows.shape(0)), static_cast<int64_t>(rows.shape(1)), panels.data(),
              threads);
}

void search_checked(const Rows& rows, const Panels& panels,
                    const std::optional<Array<const float, 1>>& offsets, float largest_offset, const Rows& features,
                    const Array<float, 2>& scores, const Array<int64_t, 2>& found, int64_t threads) {
  require_panels(rows, static_cast<int64_t>(panels.shape(0)), static_cast<int64_t>(panels.shape(1)));
  require(threads >= 1, "threads must be at least 1");
  require(!offsets.has_value() || offsets->size() == rows.shape(0), "offsets must be [rows]");
  require(features.shape(1) == rows.shape(1), "features must be as wide as the rows");
  require(
      scores.shape(0) == features.shape(0) && found.shape(0) == features.shape(0) && scores.shape(1) == found.shape(1),
      "scores and found must be [features, k]");
  const int64_t count = static_cast<int64_t>(rows.shape(0)), k = static_cast<int64_t>(scores.shape(1));
  require(k <= count, "k must be at most the number of rows");
  const SearchedRows searched{rows.data(),    panels.data(), offsets.has_value() ? offsets->data() : nullptr,
                              largest_offset, count,         static_cast<int64_t>(rows.shape(1))};
  WithoutInterpreter release;
  search_rows(searched, features.data(), static_cast<int64_t>(features.shape(0)), k, scores.data(), found.data(),
              threads);
}

}  // namespace

void bind_neighbours(nb::module_& m) {
  m.def("recall_pairs", &pairs_checked, nb::arg("a").noconvert(), nb::arg("first_a"), nb::arg("best_a"),
        nb::arg("b").noconvert(), nb::arg("first_b"), nb::arg("best_b").none(), nb::arg("threads"));
  m.def("recall_strays", &strays_checked, nb::arg("a").noconvert(), nb::arg("ids_a").noconvert(), nb::arg("best_a"),
        nb::arg("b").noconvert(), nb::arg("first_b"), nb::arg("threads"));
  m.def("trim_best", &trim_checked, nb::arg("best"), nb::arg("threads"));
  m.def("make_unit_rows", &unit_checked, nb::arg("rows").noconvert(), nb::arg("threads"));
  m.def("exact_scores", &exact_checked, nb::arg("a").noconvert(), nb::arg("ids").noconvert(),
        nb::arg("counts").noconvert(), nb::arg("b").noconvert(), nb::arg("first_b"), nb::arg("scores").noconvert(),
        nb::arg("threads"));
  m.def("exact_best", &best_checked, nb::arg("a").noconvert(), nb::arg("ids_a").noconvert(), nb::arg("b").noconvert(),
        nb::arg("first_b"), nb::arg("scores").noconvert(), nb::arg("ids").noconvert(), nb::arg("counts").noconvert(),
        nb::arg("threads"));
  m.def("rank_candidates", &rank_checked, nb::arg("scores").noconvert(), nb::arg("ids").noconvert(),
        nb::arg("counts").noconvert(), nb::arg("floors").noconvert(), nb::arg("error_bound"),
        nb::arg("out").noconvert(), nb::arg("accepted").noconvert(), nb::arg("threads"));
  m.def("panel_bytes", &panel_bytes, nb::arg("dim"));
  m.def("encode_rows", &encode_checked, nb::arg("rows").noconvert(), nb::arg("panels").noconvert(), nb::arg("threads"));
  m.def("search_rows", &search_checked, nb::arg("rows").noconvert(), nb::arg("panels").noconvert(),
        nb::arg("offsets").noconvert().none(), nb::arg("largest_offset"), nb::arg("features").noconvert(),
        nb::arg("scores").noconvert(), nb::arg("found").noconvert(), nb::arg("threads"));
  bind_select<int32_t>(m);
  bind_select<int64_t>(m);
}

}  // namespace geartrain
