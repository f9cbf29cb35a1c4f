#include "module.hpp"
#include "slot_index.hpp"

namespace geartrain {
namespace {

// No call releases the GIL: each is short, and so it is atomic for the threads of a process.

void create(SlotIndex* self, int64_t capacity) {
  require(capacity >= 1 && capacity <= SlotIndex::kMostSlots, "capacity must lie in [1, 2**31 - 2]");
  new (self) SlotIndex(capacity);
}

void grow(SlotIndex& index, int64_t capacity) {
  require(capacity >= 1 && capacity <= SlotIndex::kMostSlots, "capacity must lie in [1, 2**31 - 2]");
  index.grow(capacity);
}

void find(SlotIndex& index, const IdArray& ids, const IdOutput& slots, bool touch) {
  require(slots.size() == ids.size(), "slots must be as many as ids");
  index.find(ids.data(), static_cast<int64_t>(ids.size()), slots.data(), touch);
}

int64_t place(SlotIndex& index, const IdArray& ids, const IdOutput& slots) {
  require(slots.size() == ids.size(), "slots must be as many as ids");
  require(static_cast<int64_t>(ids.size()) <= index.capacity(), "ids must not be more than there are slots");
  return index.place(ids.data(), static_cast<int64_t>(ids.size()), slots.data());
}

void remove(SlotIndex& index, const IdArray& ids, const IdOutput& slots) {
  require(slots.size() == ids.size(), "slots must be as many as ids");
  index.remove(ids.data(), static_cast<int64_t>(ids.size()), slots.data());
}

int64_t oldest(const SlotIndex& index, const IdOutput& ids, const IdOutput& slots) {
  require(slots.size() == ids.size(), "slots must be as many as ids");
  return index.oldest(static_cast<int64_t>(ids.size()), ids.data(), slots.data());
}

}  // namespace

void bind_slot_index(nb::module_& m) {
  nb::class_<SlotIndex>(m, "SlotIndex")
      .def("__init__", &create, nb::arg("capacity"))
      .def("find", &find, nb::arg("ids").noconvert(), nb::arg("slots").noconvert(), nb::arg("touch"))
      .def("place", &place, nb::arg("ids").noconvert(), nb::arg("slots").noconvert())
      .def("remove", &remove, nb::arg("ids").noconvert(), nb::arg("slots").noconvert())
      .def("oldest", &oldest, nb::arg("ids").noconvert(), nb::arg("slots").noconvert())
      .def("grow", &grow, nb::arg("capacity"))
      .def_prop_ro("size", &SlotIndex::size)
      .def_prop_ro("capacity", &SlotIndex::capacity);
}

}  // namespace geartrain
