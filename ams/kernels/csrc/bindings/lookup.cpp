#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module.hpp"
#include "embedding/bag_sums.hpp"
#include "embedding/lookup.hpp"
#include "embedding/mapped_rows.hpp"

namespace geartrain {
namespace {

using FloatVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PlaceOutput = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using StridedFloats = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatOutput = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Lookup, and the caller's arrays that it reads.
struct HeldLookup {
  std::vector<nb::object> arrays;
  std::unique_ptr<Lookup> lookup;
};

Pooling pooling_of(const nb::handle& name) {
  static constexpr std::array<const char*, kNumPoolings> kNames{nullptr, "sum", "mean", "sqrtn", "max"};
  if (name.is_none()) return Pooling::none;
  const auto given = nb::cast<std::string>(name);
  for (size_t i = 1; i < kNames.size(); ++i)
    if (given == kNames[i]) return static_cast<Pooling>(i);
  throw std::invalid_argument("no such pooling");
}

Feature feature_of(const nb::handle& given, std::vector<nb::object>& arrays, int64_t num_tables) {
  // (table, ids [N], offsets [bags + 1] or ids of a bag, weights [N] or None, name of the pooling or None, padding or
  // None)
  const auto parts = nb::cast<nb::tuple>(given);
  require(parts.size() == 6, "a feature has six parts");
  Feature feature;
  feature.table = nb::cast<int64_t>(parts[0]);
  require(feature.table >= 0 && feature.table < num_tables, "a feature names a table that does not exist");
  const auto ids = nb::cast<IdArray>(parts[1], false);
  feature.ids = ids.data();
  feature.count = static_cast<int64_t>(ids.size());
  require(feature.count < std::numeric_limits<int32_t>::max(), "a feature has 2**31 ids or more");
  if (nb::isinstance<nb::int_>(parts[2])) {
    feature.width = nb::cast<int64_t>(parts[2]);
    require(feature.width >= 1 && feature.count % feature.width == 0, "ids must be a multiple of the width");
    feature.bags = feature.count / feature.width;
  } else {
    const auto offsets = nb::cast<IdArray>(parts[2], false);
    require(offsets.size() >= 1, "offsets must not be empty");
    feature.offsets = offsets.data();
    feature.bags = static_cast<int64_t>(offsets.size()) - 1;
    require(feature.offsets[0] == 0 && feature.offsets[feature.bags] == feature.count,
            "offsets must go from 0 to the number of ids");
    for (int64_t bag = 0; bag < feature.bags; ++bag)
      require(feature.offsets[bag] <= feature.offsets[bag + 1], "offsets must not decrease");
  }
  if (!parts[3].is_none()) {
    const auto weights = nb::cast<FloatVector>(parts[3], false);
    require(static_cast<int64_t>(weights.size()) == feature.count, "weights must be as many as ids");
    feature.weights = weights.data();
  }
  feature.pooling = pooling_of(parts[4]);
  if (!parts[5].is_none()) feature.padding = nb::cast<int64_t>(parts[5]);
  arrays.emplace_back(parts);
  return feature;
}

// `num_rows` of each table; none: any id >= 0.
void create(HeldLookup* self, const nb::list& features, const std::vector<std::optional<int64_t>>& num_rows,
            int64_t threads) {
  require(threads >= 1, "threads must be >= 1");
  std::vector<int64_t> last_ids;
  for (const std::optional<int64_t>& rows : num_rows)
    last_ids.push_back(rows ? *rows - 1 : std::numeric_limits<int64_t>::max());
  std::vector<nb::object> arrays;
  std::vector<Feature> all;
  std::vector<int64_t> counts(last_ids.size(), 0);
  for (const nb::handle given : features) {
    all.push_back(feature_of(given, arrays, static_cast<int64_t>(last_ids.size())));
    int64_t& count = counts[static_cast<size_t>(all.back().table)];
    count += all.back().count;
    require(count < std::numeric_limits<int32_t>::max(), "a table has 2**31 ids or more in one batch");
  }
  std::unique_ptr<Lookup> lookup;
  {
    const WithoutInterpreter release;
    lookup = std::make_unique<Lookup>(std::move(all), last_ids, threads);
  }
  new (self) HeldLookup{std::move(arrays), std::move(lookup)};
}

void require_table(const HeldLookup& self, int64_t table) {
  require(table >= 0 && table < self.lookup->num_tables(), "there is no such table");
}

// Returns the distinct ids of each table, in the memory of the lookup.
nb::list distinct_ids(nb::handle_t<HeldLookup> self) {
  const Lookup& lookup = *nb::cast<const HeldLookup&>(self).lookup;
  nb::list found;
  for (int64_t table = 0; table < lookup.num_tables(); ++table) {
    const std::span<const int64_t> ids = lookup.ids_of(table);
    const size_t shape[1] = {ids.size()};
    found.append(nb::cast(nb::ndarray<nb::numpy, const int64_t, nb::ndim<1>>(ids.data(), 1, shape, nb::borrow(self))));
  }
  return found;
}

nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>> places_of(nb::handle_t<HeldLookup> self, int64_t feature) {
  const HeldLookup& held = nb::cast<const HeldLookup&>(self);
  require(feature >= 0 && feature < static_cast<int64_t>(held.lookup->features().size()), "there is no such feature");
  const size_t shape[1] = {static_cast<size_t>(held.lookup->features()[static_cast<size_t>(feature)].count)};
  return {held.lookup->places_of(feature), 1, shape, nb::borrow(self)};
}

int64_t places_among(const HeldLookup& self, int64_t table, const IdArray& ids, const PlaceOutput& places) {
  require_table(self, table);
  require(places.size() == ids.size(), "places must be as many as ids");
  const WithoutInterpreter release;
  return self.lookup->places_among(table, ids.data(), static_cast<int64_t>(ids.size()), places.data());
}

void count_occurrences(const HeldLookup& self, int64_t table, const std::vector<bool>& wanted,
                       const nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
  require_table(self, table);
  require(wanted.size() == self.lookup->features().size(), "wanted must have a flag for each feature");
  require(out.size() == self.lookup->ids_of(table).size(), "out must be as many as distinct ids");
  self.lookup->count_occurrences(table, wanted, out.data());
}

// Returns a new numpy array, and the address of its numbers.
std::pair<nb::object, float*> new_matrix(int64_t rows, int64_t dim) {
  const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(dim)};
  auto* values = new float[shape[0] * shape[1]];
  const nb::capsule owner(values, [](void* held) noexcept { delete[] static_cast<float*>(held); });
  return {nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(values, 2, shape, owner)), values};
}

// `rows`: rows of each table, and their type. Returns the vectors of each feature.
nb::list pool(HeldLookup& self, const nb::list& rows, bool keep_places) {
  Lookup& lookup = *self.lookup;
  require(static_cast<int64_t>(rows.size()) == lookup.num_tables(), "rows must be as many as tables");
  std::vector<Lookup::Rows> tables;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto [matrix, dtype] = nb::cast<std::pair<Matrix, int>>(rows[i], false);
    require(matrix.shape(0) == lookup.ids_of(static_cast<int64_t>(i)).size(), "rows must be as many as distinct ids");
    tables.push_back({matrix.data(), checked_dtype(matrix, dtype), static_cast<int64_t>(matrix.shape(1))});
  }
  nb::list vectors;
  std::vector<float*> outs;
  for (const Feature& feature : lookup.features()) {
    auto [array, values] = new_matrix(feature.num_vectors(), tables[static_cast<size_t>(feature.table)].dim);
    vectors.append(array);
    outs.push_back(values);
  }
  {
    const WithoutInterpreter release;
    lookup.pool(tables, outs, keep_places);
  }
  return vectors;
}

// Returns Σ g² and the gradients of the rows of each table, whose widths are `dims`.
std::pair<double, nb::list> sum_gradients(const HeldLookup& self, const nb::list& vectors,
                                          const std::vector<int64_t>& dims) {
  const Lookup& lookup = *self.lookup;
  require(static_cast<int64_t>(dims.size()) == lookup.num_tables(), "dims must be as many as tables");
  require(vectors.size() == lookup.features().size(), "vectors must be as many as features");
  std::vector<Lookup::Gradients> gradients(vectors.size());
  std::vector<std::vector<float>> copies;  // of gradients that are not contiguous, such as expanded tensors
  for (size_t i = 0; i < vectors.size(); ++i) {
    if (vectors[i].is_none()) continue;
    const auto given = nb::cast<StridedFloats>(vectors[i], false);
    const Feature& feature = lookup.features()[i];
    const auto count = static_cast<int64_t>(given.shape(0)), dim = static_cast<int64_t>(given.shape(1));
    require(count == feature.num_vectors() && dim == dims[static_cast<size_t>(feature.table)],
            "gradients have another shape");
    gradients[i] = {given.data(), given.stride(0)};
    if (dim <= 1 || given.stride(1) == 1) continue;
    std::vector<float>& copy = copies.emplace_back(static_cast<size_t>(count * dim));
    for (int64_t at = 0; at < count * dim; ++at)
      copy[static_cast<size_t>(at)] = given.data()[at / dim * given.stride(0) + at % dim * given.stride(1)];
    gradients[i] = {copy.data(), dim};
  }
  nb::list sums;
  std::vector<float*> outs;
  for (size_t i = 0; i < dims.size(); ++i) {
    auto [array, values] = new_matrix(static_cast<int64_t>(lookup.ids_of(static_cast<int64_t>(i)).size()), dims[i]);
    sums.append(array);
    outs.push_back(values);
  }
  double squares = 0;
  {
    const WithoutInterpreter release;
    squares = lookup.sum_gradients(gradients, dims, outs);
  }
  return {squares, sums};
}

using Places = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

RowBags bags_of(const Places& places, const Places& counts, const std::optional<FloatVector>& weights,
                size_t num_rows) {
  require(!weights || weights->size() == places.size(), "weights must be as many as places");
  const RowBags bags{.places = places.data(),
                     .count = static_cast<int64_t>(places.size()),
                     .counts = counts.data(),
                     .bags = static_cast<int64_t>(counts.size()),
                     .weights = weights ? weights->data() : nullptr,
                     .num_rows = static_cast<int64_t>(num_rows)};
  require(bags.is_sound(), "counts must add up to the places, and places be those of rows");
  return bags;
}

void pool_row_bags(const FloatMatrix& rows, const Places& places, const Places& counts,
                   const std::optional<FloatVector>& weights, const FloatOutput& out) {
  const RowBags bags = bags_of(places, counts, weights, rows.shape(0));
  require(out.shape(0) == counts.size() && out.shape(1) == rows.shape(1), "out has another shape");
  const WithoutInterpreter release;
  pool_bags(bags, rows.data(), static_cast<int64_t>(rows.shape(1)), out.data());
}

void spread_row_bags(const FloatMatrix& vectors, const Places& places, const Places& counts,
                     const std::optional<FloatVector>& weights, const FloatOutput& out) {
  const RowBags bags = bags_of(places, counts, weights, out.shape(0));
  require(vectors.shape(0) == counts.size() && out.shape(1) == vectors.shape(1), "vectors have another shape");
  const WithoutInterpreter release;
  spread_bags(bags, vectors.data(), static_cast<int64_t>(out.shape(1)), out.data());
}

using StridedRows = nb::ndarray<nb::ndim<2>, nb::device::cpu>;

// Mapped arrays of several tables, held while rows may be pulled.
struct HeldTables {
  std::vector<nb::object> arrays;
  std::vector<MappedRows> tables;
  std::vector<size_t> widths, item_sizes;
};

void hold_tables(HeldTables* self, const nb::list& given) {
  HeldTables held;
  for (const nb::handle parts : given) {
    const auto table = nb::cast<nb::tuple>(parts);
    require(table.size() == 3, "a table has starts, ids and rows");
    const auto starts = nb::cast<IdArray>(table[0], false), ids = nb::cast<IdArray>(table[1], false);
    const auto rows = nb::cast<Matrix>(table[2], false);
    const size_t ranges = starts.size() - 1;
    require(starts.size() >= 2 && (ranges & (ranges - 1)) == 0, "starts must have a power of two plus one elements");
    require(rows.shape(0) == ids.size(), "rows must be as many as ids");
    int bits = 0;
    while ((size_t{1} << bits) < ranges) ++bits;
    held.tables.push_back({.starts = starts.data(),
                           .ids = ids.data(),
                           .rows = static_cast<const char*>(rows.data()),
                           .count = static_cast<int64_t>(ids.size()),
                           .bits = bits,
                           .row_bytes = rows.shape(1) * rows.itemsize()});
    held.widths.push_back(rows.shape(1));
    held.item_sizes.push_back(rows.itemsize());
    held.arrays.emplace_back(table);
  }
  new (self) HeldTables(std::move(held));
}

// Writes the places of ids without a row to `missing`, table after table, and their numbers to `counts`.
void pull_tables(const HeldTables& self, const std::vector<size_t>& tables, const nb::list& ids, const nb::list& outs,
                 const IdOutput& missing, const IdOutput& counts) {
  struct Pull {
    const MappedRows* table;
    const int64_t* ids;
    int64_t count;
    char* out;
    size_t stride;
  };
  require(ids.size() == tables.size() && outs.size() == tables.size() && counts.size() == tables.size(),
          "ids, out and counts must be as many as tables");
  std::vector<Pull> pulls;
  size_t total = 0;
  for (size_t i = 0; i < tables.size(); ++i) {
    require(tables[i] < self.tables.size(), "there is no such table");
    const auto own = nb::cast<IdArray>(ids[i], false);
    const auto out = nb::cast<StridedRows>(outs[i], false);
    require(out.shape(0) == own.size(), "out must be as many as ids");
    require(out.shape(1) == self.widths[tables[i]] && out.itemsize() == self.item_sizes[tables[i]],
            "out has another width or type");
    require(out.size() == 0 || out.shape(1) <= 1 || out.stride(1) == 1, "each row of out must be contiguous");
    require(out.shape(0) <= 1 || out.stride(0) >= static_cast<int64_t>(out.shape(1)), "rows of out must not overlap");
    pulls.push_back({.table = &self.tables[tables[i]],
                     .ids = own.data(),
                     .count = static_cast<int64_t>(own.size()),
                     .out = static_cast<char*>(out.data()),
                     .stride = static_cast<size_t>(out.stride(0)) * out.itemsize()});
    total += own.size();
  }
  require(missing.size() >= total, "missing must have room for all ids");
  const WithoutInterpreter release;
  int64_t done = 0;
  for (size_t i = 0; i < pulls.size(); ++i) {
    const Pull& pull = pulls[i];
    counts.data()[i] = pull.table->pull(pull.ids, pull.count, pull.out, pull.stride, missing.data() + done);
    done += counts.data()[i];
  }
}

}  // namespace

void bind_lookup(nb::module_& m) {
  static PyObject* bad_id = new_exception(m, "BadId", PyExc_ValueError);
  translate<BadId, [](const BadId& bad) { PyErr_SetObject(bad_id, nb::make_tuple(bad.feature, bad.place).ptr()); }>();
  nb::class_<HeldLookup>(m, "Lookup")
      .def("__init__", &create, nb::arg("features"), nb::arg("num_rows"), nb::arg("threads"))
      .def("distinct_ids", &distinct_ids)
      .def("places_of", &places_of, nb::arg("feature"))
      .def("places_among", &places_among, nb::arg("table"), nb::arg("ids"), nb::arg("places"))
      .def("count_occurrences", &count_occurrences, nb::arg("table"), nb::arg("wanted"), nb::arg("out").noconvert())
      .def("pool", &pool, nb::arg("rows"), nb::arg("keep_places"))
      .def("sum_gradients", &sum_gradients, nb::arg("vectors"), nb::arg("dims"));
  nb::class_<HeldTables>(m, "MappedRows")
      .def("__init__", &hold_tables, nb::arg("tables"))
      .def("pull", &pull_tables, nb::arg("tables"), nb::arg("ids"), nb::arg("outs"), nb::arg("missing").noconvert(),
           nb::arg("counts").noconvert());
  m.def("pool_bags", &pool_row_bags, nb::arg("rows"), nb::arg("places"), nb::arg("counts"), nb::arg("weights").none(),
        nb::arg("out"));
  m.def("spread_bags", &spread_row_bags, nb::arg("vectors"), nb::arg("places"), nb::arg("counts"),
        nb::arg("weights").none(), nb::arg("out"));
}

}  // namespace geartrain
