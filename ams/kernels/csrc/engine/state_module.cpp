#include <nanobind/stl/string.h>

#include "base/module.hpp"
#include "engine/failpoint.hpp"
#include "engine/lease.hpp"
#include "engine/python.hpp"

namespace geartrain {
namespace {

// No call gives up the interpreter lock: none waits for anything, and giving it up costs more than they do.
void bind_lease(nb::module_& m) {
  nb::class_<Lease>(m, "Lease")
      .def(
          "__init__",
          [](Lease* self, int64_t shard, double seconds, nb::object clock) {
            new (self) Lease(shard, seconds, clock_of(std::move(clock), boot_seconds));
          },
          nb::arg("shard"), nb::arg("seconds"), nb::arg("clock") = nb::none())
      .def_prop_ro("seconds", &Lease::seconds)
      .def("now", &Lease::now)
      .def("pulse", &Lease::pulse)
      .def("check", &Lease::check)
      .def("confirm", &Lease::confirm, nb::arg("began"))
      .def("revoke", &Lease::revoke, nb::arg("reason"));
  m.def("boot_seconds", &boot_seconds);
}

}  // namespace

void bind_engine_state(nb::module_& m) {
  bind_lease(m);
  m.def("arm_failpoints", [](bool armed) { failpoints_armed = armed; }, nb::arg("armed"));
  m.def("reach_failpoint", [](const char* name) { failpoint(name); }, nb::arg("name"));
}

}  // namespace geartrain
