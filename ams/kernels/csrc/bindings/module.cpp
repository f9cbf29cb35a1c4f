#include "bindings/conversions.hpp"
#include "bindings/module.hpp"

#include <algorithm>

#include "base/keyed_hash.hpp"
#include "index/id_index.hpp"
#include "machine/too_many_ids.hpp"
#include "machine/isa.hpp"
#include "machine/lookahead.hpp"
#include "machine/memory_budget.hpp"
#include "routing/merge_route.hpp"
#include "sampling/sampling.hpp"

namespace geartrain {
namespace {

using FloatOutput = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

constexpr int64_t kFewIds = 10'000;

void raise(const Fault& fault) {
  const nb::object error = error_of(fault);
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

void bind_refusals(nb::module_& m) {
  static PyObject* refused_class = new_exception(m, "Refused", PyExc_ValueError);
  translate<Refusal, [](const Refusal& refusal) {
    PyErr_SetObject(refused_class, nb::make_tuple(static_cast<int>(refusal.reason), refusal.index).ptr());
  }>();
  translate<Fault, raise>();
  translate<OverBudget, [](const OverBudget& refused) { raise({"OutOfMemory", refused.words()}); }>();
  translate<TooManyIds, [](const TooManyIds& refused) { raise({"OutOfMemory", refused.words()}); }>();
  translate<TooManyRows, [](const TooManyRows& refused) { raise({"TableFull", refused.words()}); }>();
  m.def("reserve_ids", [](int64_t count) { IdIndex().reserve(count); }, nb::arg("count"));
  m.def("set_memory_limit", &set_memory_limit, nb::arg("bytes"));
  m.def("memory_limit", &memory_limit);
  m.def("memory_used", &memory_used);
}

int64_t first_outside_checked(const IdArray& ids, int64_t last) {
  const int64_t count = static_cast<int64_t>(ids.size());
  // faster than acquiring the interpreter lock again
  if (count <= kFewIds) return first_out_of_range(ids.data(), count, last);
  const WithoutInterpreter release;
  return first_out_of_range(ids.data(), count, last);
}

int64_t merge_ids_checked(const IdArray& ids, const IdOutput& distinct, const IdOutput& inverse) {
  require(distinct.size() >= ids.size() && inverse.size() == ids.size(),
          "inverse must be as long as ids, distinct at least as long");
  WithoutInterpreter release;
  return merge_ids(ids.data(), static_cast<int64_t>(ids.size()), distinct.data(), inverse.data());
}

void sum_rows_checked(const Matrix& rows, int dtype_code, const IdArray& inverse, const FloatOutput& sums) {
  const DType dtype = checked_dtype(rows, dtype_code);
  const int64_t count = static_cast<int64_t>(inverse.size()), num_distinct = static_cast<int64_t>(sums.shape(0));
  require(rows.shape(0) == inverse.size() && rows.shape(1) == sums.shape(1), "rows must be [N, D], sums [U, D]");
  WithoutInterpreter release;
  int64_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    require(inverse.data()[i] >= 0 && inverse.data()[i] <= next && inverse.data()[i] < num_distinct,
            "inverse must number the distinct ids in order of first appearance");
    next += inverse.data()[i] == next;
  }
  require(next == num_distinct, "sums has a row that no id adds to");
  sum_rows(rows.data(), dtype, inverse.data(), count, static_cast<int64_t>(rows.shape(1)), num_distinct, sums.data());
}

void route_checked(const IdArray& ids, const ShardMap& bucket_to_shard, bool dense, const IdOutput& order,
                   const IdOutput& counts) {
  require(order.size() == ids.size(), "order must be as long as ids");
  const uint16_t* map = bucket_to_shard.data();
  require(*std::max_element(map, map + kNumBuckets) < counts.size(),
          "bucket_to_shard names a shard beyond the length of counts");
  WithoutInterpreter release;
  route(ids.data(), static_cast<int64_t>(ids.size()), map, dense, static_cast<int64_t>(counts.size()), order.data(),
        counts.data());
}

int64_t first_non_finite_checked(const AnyArray& values, int dtype_code) {
  const DType dtype = checked_dtype(values, dtype_code);
  WithoutInterpreter release;
  return first_non_finite(values.data(), dtype, static_cast<int64_t>(values.size()));
}

void sample_checked(int64_t num_ids, int64_t first, uint64_t seed, uint64_t step, const IdOutput& out) {
  const int64_t count = static_cast<int64_t>(out.size());
  require(num_ids >= 1 && num_ids <= int64_t{1} << 62, "num_ids must lie in [1, 2**62]");
  require(first >= 0 && count <= num_ids && first <= num_ids - count, "first + count must not exceed num_ids");
  WithoutInterpreter release;
  sample_permutation(num_ids, first, count, seed, step, out.data());
}

// PyBytes_FromStringAndSize(nullptr, n) is CPython's way to make bytes that their creator fills before any other code
// can see them.
nb::tuple alloc_bytes(const nb::bytes& head, int64_t room) {
  require(room >= 0, "room must be >= 0");
  const size_t head_bytes = head.size();
  nb::object data =
      nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head_bytes + static_cast<size_t>(room))));
  if (!data.is_valid()) throw nb::python_error();
  char* begin = PyBytes_AS_STRING(data.ptr());
  std::copy_n(head.c_str(), head_bytes, begin);
  const size_t shape[1] = {static_cast<size_t>(room)};
  return nb::make_tuple(data, nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(begin + head_bytes, 1, shape, data));
}

}  // namespace
}  // namespace geartrain

NB_MODULE(_core, m) {
  using namespace geartrain;
  m.doc() = "Row storage kernels of Geartrain; geartrain.ams.kernels.ops is the typed face.";
  m.attr("isa") = uses_amx() ? "amx" : isa_name(active_isa());
  m.attr("hash_seed") = hash_seed;
  m.attr("lookahead") = lookahead_name(active_lookahead(Use::read));
  // A table that a script still holds when the interpreter ends is no leak worth a page of warnings.
  nb::set_leak_warnings(false);
  bind_refusals(m);
  bind_carriers(m);
  bind_row_store(m);
  bind_class_pass(m);
  bind_neighbours(m);
  bind_position_lru(m);
  bind_lookup(m);
  bind_gradients(m);
  bind_writes(m);
  bind_engine(m);
  bind_rows_client(m);
#ifdef GEARTRAIN_TEST_HELPERS
  bind_test_helpers(m);
#endif
  m.def(
      "is_rising", [](const IdArray& ids) { return is_rising(ids.data(), static_cast<int64_t>(ids.size())); },
      nb::arg("ids").noconvert(), nb::call_guard<WithoutInterpreter>());
  m.def("first_out_of_range", &first_outside_checked, nb::arg("ids").noconvert(), nb::arg("last"));
  m.def("merge_ids", &merge_ids_checked, nb::arg("ids").noconvert(), nb::arg("distinct").noconvert(),
        nb::arg("inverse").noconvert());
  m.def("sum_rows", &sum_rows_checked, nb::arg("rows").noconvert(), nb::arg("dtype_code"),
        nb::arg("inverse").noconvert(), nb::arg("sums").noconvert());
  m.def("route", &route_checked, nb::arg("ids").noconvert(), nb::arg("bucket_to_shard").noconvert(), nb::arg("dense"),
        nb::arg("order").noconvert(), nb::arg("counts").noconvert());
  m.def("first_non_finite", &first_non_finite_checked, nb::arg("values").noconvert(), nb::arg("dtype_code"));
  m.def("alloc_bytes", &alloc_bytes, nb::arg("head"), nb::arg("room"));
  m.def("sample_permutation", &sample_checked, nb::arg("num_ids"), nb::arg("first"), nb::arg("seed"), nb::arg("step"),
        nb::arg("out").noconvert());
}
