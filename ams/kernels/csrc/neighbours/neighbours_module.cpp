#include <algorithm>

#include "neighbours/neighbours.hpp"
#include "python/module.hpp"

namespace geartrain {
namespace {

template <class Id>
using Lists = nb::ndarray<const Id, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns (count or offending place, fault).
template <class Id>
nb::tuple select_checked(const IdArray& offsets, const Lists<Id>& ids, const IdArray& labels, int64_t budget, uint64_t seed,
                         uint64_t step, const IdOutput& out) {
  require(offsets.size() >= 2, "offsets must be [num_classes + 1]");
  const NeighbourLists<Id> table{offsets.data(), ids.data(), static_cast<int64_t>(offsets.size()) - 1,
                                 static_cast<int64_t>(ids.size())};
  const int64_t room = static_cast<int64_t>(out.size()), num_labels = static_cast<int64_t>(labels.size());
  require(budget >= 1 && room >= std::min(std::max(budget, num_labels), table.num_classes), "out is too short");
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

}  // namespace

void bind_neighbours(nb::module_& m) {
  bind_select<int32_t>(m);
  bind_select<int64_t>(m);
}

}  // namespace geartrain
