#include <nanobind/stl/optional.h>

#include <limits>
#include <optional>

#include "cache/freshness.hpp"
#include "cache/position_lru.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

// No call releases the interpreter lock: each is short, and so atomic for the threads of a process. Capacities and
// sizes are checked in kernels/position_lru.py.

void find(PositionLru& index, const IdArray& ids, const IdOutput& positions, bool touch) {
  index.find(ids.data(), static_cast<int64_t>(ids.size()), positions.data(), touch);
}

int64_t place(PositionLru& index, const IdArray& ids, const IdOutput& positions) {
  return index.place(ids.data(), static_cast<int64_t>(ids.size()), positions.data());
}

void remove(PositionLru& index, const IdArray& ids, const IdOutput& positions) {
  index.remove(ids.data(), static_cast<int64_t>(ids.size()), positions.data());
}

int64_t oldest(const PositionLru& index, const IdOutput& ids, const IdOutput& positions) {
  return index.oldest(static_cast<int64_t>(ids.size()), ids.data(), positions.data());
}

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoubleOutput = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BoolOutput = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple judge_checked(const std::optional<IdArray>& positions, const IdArray& versions, const Doubles& times,
                        double now, int64_t dense_version, double expire_seconds, const std::optional<int64_t>& max_lag,
                        const IdOutput& out_versions, const DoubleOutput& out_times, const BoolOutput& hits,
                        const Doubles& age_edges, const IdOutput& age_counts, const IdOutput& lag_counts) {
  const size_t count = positions ? positions->size() : versions.size();
  require(versions.size() == times.size(), "versions and times must be equally long");
  require(age_counts.size() == age_edges.size() + 1 && lag_counts.size() >= 1, "a histogram has the wrong size");
  require(!max_lag || *max_lag >= 0, "max_lag must be >= 0");
  if (positions)
    for (size_t i = 0; i < count; ++i)
      require(static_cast<uint64_t>(positions->data()[i]) < versions.size(),
              "a position is outside versions and times");
  const Freshness freshness{now, dense_version, expire_seconds,
                            max_lag ? static_cast<uint64_t>(*max_lag) : std::numeric_limits<uint64_t>::max()};
  const AgeCounts counts{age_edges.data(), static_cast<int64_t>(age_edges.size()), age_counts.data(), lag_counts.data(),
                         static_cast<int64_t>(lag_counts.size())};
  const FreshnessCheck judged =
      judge(positions ? positions->data() : nullptr, static_cast<int64_t>(count), {versions.data(), times.data()},
            freshness, out_versions.data(), out_times.data(), hits.data(), counts);
  return nb::make_tuple(judged.hits, judged.absent, judged.lagging);
}

}  // namespace

void bind_position_lru(nb::module_& m) {
  nb::class_<PositionLru>(m, "PositionLru")
      .def(nb::init<int64_t>(), nb::arg("capacity"))
      .def("find", &find, nb::arg("ids").noconvert(), nb::arg("positions").noconvert(), nb::arg("touch"))
      .def("place", &place, nb::arg("ids").noconvert(), nb::arg("positions").noconvert())
      .def("remove", &remove, nb::arg("ids").noconvert(), nb::arg("positions").noconvert())
      .def("oldest", &oldest, nb::arg("ids").noconvert(), nb::arg("positions").noconvert())
      .def("grow", &PositionLru::grow, nb::arg("capacity"))
      .def_prop_ro("size", &PositionLru::size)
      .def_prop_ro("capacity", &PositionLru::capacity);
  m.def("judge", &judge_checked, nb::arg("positions").noconvert().none(), nb::arg("versions").noconvert(),
        nb::arg("times").noconvert(), nb::arg("now"), nb::arg("dense_version"), nb::arg("expire_seconds"),
        nb::arg("max_lag").none(), nb::arg("out_versions").noconvert(), nb::arg("out_times").noconvert(),
        nb::arg("hits").noconvert(), nb::arg("age_edges").noconvert(), nb::arg("age_counts").noconvert(),
        nb::arg("lag_counts").noconvert());
}

}  // namespace geartrain
